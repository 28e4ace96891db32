"""The rows of a run: ours beside the fastest peer, and documents of before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.bench.decode.benchmark import BENCHMARK as DECODE
from ostinato.bench.gemm.benchmark import BENCHMARK as GEMM
from ostinato.bench.harness.benchmark import Benchmark
from ostinato.bench.harness.summary import times, with_peers
from ostinato.bench.prefill.benchmark import BENCHMARKS as PREFILL
from ostinato.bench.report import Report, Row

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def row(impl: str, us: float, case: str = "N8 K8 M1") -> Row:
    return Row("gemm", case, impl, us, 0.1, 0.2)


def test_our_rows_have_the_fastest_rival_of_their_case() -> None:
    rows = [
        row("ostinato_int8", 2.0),
        row("sgl_i8", 4.0),
        row("smm_row", 3.0),
        row("bf16", 1.0),
        row("ostinato_int8", 5.0, "N8 K8 M2"),
        row("bf16", 1.0, "N8 K8 M2"),
    ]
    found = with_peers(rows, GEMM.summary.rivals)
    assert [(one.peer, one.ratio) for one in found] == [
        ("smm_row", 0.6667),
        *[(None, None)] * 5,
    ]
    assert [(one.impl, one.us) for one in found] == [(one.impl, one.us) for one in rows]


def test_a_document_has_the_columns_where_there_is_a_peer() -> None:
    report = Report("a GPU", {}, None)
    report.rows += with_peers([row("ostinato_int8", 2.0), row("sgl_i8", 4.0)], lambda a, b: b != a)
    first, second = json.loads(report.to_json())["rows"]
    columns = ["section", "case", "impl", "us", "tb_s", "tflop_s"]
    assert list(first) == [*columns, "peer", "ratio"]
    assert (first["peer"], first["ratio"]) == ("sgl_i8", 0.5)
    assert list(second) == columns


@pytest.mark.parametrize(
    ("file", "benchmark"),
    [
        ("gemm.json", GEMM),
        ("decode.json", DECODE),
        ("prefill.json", PREFILL["bf16"]),
        ("prefill_fp8.json", PREFILL["fp8"]),
    ],
)
def test_committed_documents_are_read_and_summed_up(file: str, benchmark: Benchmark) -> None:
    rows = [Row(**fields) for fields in json.loads((RESULTS / "h200" / file).read_text())["rows"]]
    assert {one.section for one in rows} == {benchmark.section}
    measured = times(rows, benchmark.parse)
    printed = (RESULTS / "h200" / "texts" / file).with_suffix(".txt").read_text()
    [part] = printed.split("== against the peers of this run (µs)\n")[1:]
    lines = benchmark.summary.lines(measured, measured)
    assert part.startswith("\n".join(lines) + "\n")
