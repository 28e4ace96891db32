"""Joining our times and vLLM's: like is compared with like."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import side_by_side

KEYS = {"gpu": "card", "commit": "c", "versions": {"ostinato": "1"}}


def ours(*impls: str, commit: str = "c") -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for us, impl in enumerate(impls, 1000):
        case = "llama-3.1-8b b32 prompt4096 cached"
        rows += [
            {"section": "startup", "case": "s", "impl": impl, "engine_s": 1, "capture_s": 2},
            {"section": "engine", "case": case, "impl": impl, "us": us},
            {"section": "first_token", "case": case, "impl": impl, "us": us},
        ]
    return {**KEYS, "commit": commit, "rows": rows}


def theirs(prompt: int | None = 4096, **fields: Any) -> dict[str, Any]:
    known = {} if prompt is None else {"prompt": prompt}
    return {
        "versions": {"vllm": "9", "gpu": "card"},
        "phases": {"LLM_init_s": 9, "load_model_s": 3, "init_device_s": 1},
        "rows": [{"batch": 32, "ms_step": 2, **known}],
        **fields,
    }


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *argv: Any) -> dict[str, Any]:
    out = tmp_path / "out.json"
    paths = []
    for i, each in enumerate(argv):
        path = each
        if isinstance(each, dict):
            path = tmp_path / f"{i}.json"
            path.write_text(json.dumps(each))
        paths.append(str(path))
    monkeypatch.setattr(sys, "argv", ["side_by_side", "--out", str(out), *paths])
    side_by_side.main()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


OVER = ("ostinato_int8", "ostinato_int8_fp8kv", "ostinato_int8_fp8kv_token")


@pytest.mark.parametrize(("kv", "us"), [("bf16", 1000), ("fp8", 1001)])
def test_caches_of_one_dtype_are_compared(
    kv: str, us: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = written(
        tmp_path, monkeypatch, "--kv", kv, "int8", ours(*OVER), theirs(kv=kv, first=[])
    )
    assert document["versions"]["vllm"] == "9"
    assert {(row["dtype"], row["kv"], row["head"]) for row in document["rows"]} == {
        ("int8", kv, "bf16")
    }
    [mine] = (row for row in document["rows"] if "ratio" in row)
    assert (mine["section"], mine["us"], mine["peer"]) == ("step", us, "vllm_9")
    assert mine["ratio"] == pytest.approx(us / 2000, abs=1e-3)


@pytest.mark.parametrize(("prompt", "compared"), [(4096, 1), (None, 1), (128, 0)])
def test_other_prompts_are_not_compared(prompt: int | None, compared: int) -> None:
    rows = side_by_side.joined("int8", ours("ostinato_int8"), theirs(prompt))
    assert sum("ratio" in row for row in rows) == compared


def test_another_cache_of_theirs_is_refused() -> None:
    with pytest.raises(ValueError, match="kv: got bf16 of vLLM's cache, expected fp8"):
        side_by_side.joined("int8", ours(*OVER), theirs(), "fp8")


def test_rows_of_ours_come_first_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {**KEYS, "rows": [{"section": "step", "case": "x", "impl": "ostinato_int8", "us": 1}]}
    both: list[Any] = ["--also", step, "--", "int8", ours("ostinato_int8"), theirs()]
    assert written(tmp_path, monkeypatch, *both)["rows"][0] == step["rows"][0]
    # What another dtype was compared with stays, and so does what is added once more.
    again = written(tmp_path, monkeypatch, "--also", step, "--", "fp8", ours("o"), theirs())
    assert [row.get("dtype") for row in again["rows"]] == [None, *["int8"] * 5, *["fp8"] * 5]
    alone = written(tmp_path, monkeypatch, "--also", step)
    assert [row.get("dtype") for row in alone["rows"]] == [None, *["int8"] * 5, *["fp8"] * 5]
    with pytest.raises(SystemExit, match="got commit d, expected c"):
        written(tmp_path, monkeypatch, "--also", step, ours("o", commit="d"))
