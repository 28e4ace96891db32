"""The file that compares our server with a peer's and with the engine without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serve_side_by_side import main

HEAD = {"gpu": "H", "versions": {"torch": "2"}, "commit": "c1"}
LOAD = {"section": "serve", "case": "m c4 prompt1-2 out3", "requests": 8, "failed": 0}
OURS = {"impl": "ostinato_int8", "output_tokens_s": 300.0}
OURS |= {"first_ms": [8.0, 9.0, 10.0], "between_ms": [1.0, 2.0, 4.0]}
THEIRS = {"impl": "vllm_0.33.0", "output_tokens_s": 200.0}
THEIRS |= {"first_ms": [10.0, 11.0, 12.0], "between_ms": [2.0, 3.0, 5.0]}
STEP = {"section": "step", "case": "m b4 prompt8", "impl": "ostinato_int8", "us": 1020.0}
ENGINE = {"section": "engine", "case": "m b4 prompt8", "impl": "ostinato_int8", "us": 1000.0}


def _file(folder: Path, name: str, *rows: dict[str, Any], **head: str) -> str:
    file = folder / name
    file.write_text(json.dumps({**HEAD, **head, "rows": rows}))
    return str(file)


def test_rows_have_their_peer_and_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = [_file(tmp_path, "a", LOAD | OURS), _file(tmp_path, "s", STEP)]
    theirs = ["--theirs", _file(tmp_path, "b", LOAD | THEIRS)]
    engine = ["--engine", _file(tmp_path, "e", ENGINE, ENGINE | {"case": "m b1 prompt8"})]
    out = tmp_path / "serve.json"
    flags = ["--out", str(out), "--dtype", "int8", "--ours", *ours, *theirs, *engine]
    main([*flags, "--note", "kv_gib=40", "head=bf16"])
    document = json.loads(out.read_text())
    assert {name: document[name] for name in HEAD} == HEAD
    their, mine, step = document["rows"]
    assert their == LOAD | THEIRS | {"dtype": "int8", "kv_gib": 40, "head": "bf16"}
    assert (mine["peer"], mine["ratio"]) == ("vllm_0.33.0", 1.5)
    assert (mine["first_p50_ratio"], mine["between_p99_ratio"]) == (0.8, 0.8)
    assert (step["peer"], step["peer_us"]) == ("ostinato_int8 bench engine", 1000.0)
    assert step["ratio"] == 1.02
    assert "int8 m c4 prompt1-2 out3 1.5 0.8 0.8" in capsys.readouterr().out


def test_rows_of_another_dtype_and_commit_stay(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    for dtype, commit in (("int8", "c1"), ("fp8", "c2"), ("fp8", "c2")):
        ours = _file(tmp_path, "a", LOAD | OURS, commit=commit)
        main(["--out", str(out), "--dtype", dtype, "--ours", ours])
    document = json.loads(out.read_text())
    assert document["commit"] == "c2"
    assert [(row["dtype"], row.get("commit")) for row in document["rows"]] == [
        ("int8", "c1"),
        ("fp8", None),
    ]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (LOAD | THEIRS | {"failed": 1}, "1 requests of vllm_0.33.0 have failed"),
        (LOAD | THEIRS | {"requests": 9}, "got 8 and 9 requests"),
    ],
)
def test_loads_that_do_not_compare_are_refused(
    tmp_path: Path, theirs: dict[str, Any], said: str
) -> None:
    files = ["--ours", _file(tmp_path, "a", LOAD | OURS), "--theirs", _file(tmp_path, "b", theirs)]
    with pytest.raises(ValueError, match=said):
        main(["--out", str(tmp_path / "o"), "--dtype", "int8", *files])
    cards = ["--ours", files[1], "--theirs", _file(tmp_path, "c", LOAD | THEIRS, gpu="other")]
    with pytest.raises(SystemExit, match="got other"):
        main(["--out", str(tmp_path / "o"), "--dtype", "int8", *cards])
