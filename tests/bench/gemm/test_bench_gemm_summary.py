"""The comparison of GEMM times: ratios to the best peer, means, worst cases and cliffs."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.bench.gemm.benchmark import BENCHMARK, cliffs, is_rival
from ostinato.bench.gemm.cases import Case
from ostinato.bench.harness.summary import compare, geometric_mean, read_targets, times
from ostinato.bench.report import Row

PEERS = {
    Case.parse("N6144 K4096 M1"): {"sgl_i8": 10.0, "smm_ten": 8.0, "bf16": 1.0, "int_mm": 1.0},
    Case.parse("N6144 K4096 M2048"): {"sgl_f8": 100.0},
    Case.parse("N8 K8 M1"): {"bf16": 3.0},
}
OURS = {
    Case.parse("N6144 K4096 M1"): {"ostinato_int8": 6.0, "ostinato_fp8": 8.0},
    Case.parse("N6144 K4096 M2048"): {"ostinato_int8": 110.0},
    Case.parse("N8 K8 M1"): {"ostinato_int8": 1.0},
    Case.parse("N9 K9 M1"): {"ostinato_int8": 1.0},
}


def test_rows_become_times() -> None:
    rows = [
        Row("gemm", "N8 K16 M1", "ostinato_int8", 2.5, 0.1, 0.2),
        Row("gemm", "N8 K16 M1", "sgl_i8", 3.5, 0.1, 0.2),
    ]
    assert times(rows, Case.parse) == {
        Case.parse("N8 K16 M1"): {"ostinato_int8": 2.5, "sgl_i8": 3.5}
    }


def test_the_best_w8a8_peer_of_either_dtype_counts() -> None:
    first, second = compare("ostinato_int8", OURS, PEERS, partial(is_rival, "ostinato_int8"))
    assert (str(first.case), first.peer, first.peer_us) == ("N6144 K4096 M1", "smm_ten", 8.0)
    assert first.ratio == 0.75
    assert (second.peer, second.ratio) == ("sgl_f8", 1.1)
    [only] = compare("ostinato_fp8", OURS, PEERS, partial(is_rival, "ostinato_int8"))
    assert only.ratio == 1.0
    assert compare("ostinato_fp8_nopdl", OURS, PEERS, partial(is_rival, "ostinato_int8")) == []


def test_ours_in_bf16_is_compared_with_bf16_alone() -> None:
    case = Case.parse("N6144 K4096 M1")
    ours = {case: {"ostinato_bf16": 0.9}}
    [only] = compare("ostinato_bf16", ours, PEERS, partial(is_rival, "ostinato_bf16"))
    assert (only.peer, only.ratio) == ("bf16", 0.9)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_the_geometric_mean(values: list[float]) -> None:
    mean = geometric_mean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert math.isclose(mean ** len(values), math.prod(values), rel_tol=1e-6)


def test_nothing_has_no_geometric_mean() -> None:
    with pytest.raises(ValueError, match="values: got none"):
        geometric_mean([])


def test_a_cliff_is_a_time_that_more_tokens_would_shorten() -> None:
    by_m = {1: 10.0, 8: 9.6, 9: 12.0, 16: 11.0, 32: 20.0}
    ours = {Case.parse(f"N8 K8 M{m}"): {"ostinato_int8": us} for m, us in by_m.items()}
    ours[Case.parse("N9 K8 M64")] = {"ostinato_int8": 1.0}
    found = [(str(a), b.m) for a, b in cliffs("ostinato_int8", ours)]
    assert found == [("N8 K8 M9", 16)]
    assert cliffs("ostinato_fp8", ours) == []


def test_the_summary_has_every_case_groups_and_the_worst() -> None:
    text = "\n".join(BENCHMARK.summary.lines(OURS, PEERS))
    assert "N6144 K4096 M1          smm_ten       8.00      6.00 ×0.750      8.00 ×1.000" in text
    assert "N6144 K4096 M2048       sgl_f8      100.00    110.00 ×1.100                -" in text
    assert "N8 K8" not in text
    assert "ostinato_int8 / best peer:\n  all: ×0.908, at most ×1.100, 2 cases" in text
    assert "  llama-8b, M <= 16: ×0.750, at most ×0.750, 1 cases" in text
    assert "  M > 1024: ×1.100, at most ×1.100, 1 cases" in text
    assert "  worst: N6144 K4096 M2048 ×1.100 of sgl_f8\n  worst: N6144 K4096 M1" in text


def test_a_summary_without_peers_says_so() -> None:
    assert "  nothing to compare" in BENCHMARK.summary.lines(OURS, {})


def test_targets_are_read(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    rows = [
        {"section": "gemm", "case": "N8 K8 M1", "peer": "sgl_i8", "us": 3},
        {"section": "decode", "case": "32/8 b1 kv512", "peer": "fa3", "us": 9},
    ]
    file.write_text(json.dumps({"rows": rows}))
    assert read_targets(file, "gemm", Case.parse) == {Case.parse("N8 K8 M1"): {"sgl_i8": 3.0}}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"rows": 3}', '{"rows": [{"section": "gemm", "case": "N8", "us": 1}]}'],
)
def test_other_documents_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="not a document of peers' times"):
        read_targets(file, "gemm", Case.parse)
