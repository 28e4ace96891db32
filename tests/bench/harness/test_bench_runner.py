"""A benchmark in one file: cases, inputs, a check and implementations are all that it takes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from importlib import metadata

import torch

from ostinato.bench.harness.benchmark import Benchmark, Implementation, each, one_layout_at_a_time
from ostinato.bench.harness.check import Sample, sample_check
from ostinato.bench.harness.runner import time_cases
from ostinato.bench.harness.summary import OURS, Summary

CPU = torch.device("cpu")


@dataclass(frozen=True, order=True)
class Doubling:
    size: int

    def __str__(self) -> str:
        return f"x{self.size}"

    @property
    def flops(self) -> int:
        return self.size


@dataclass(frozen=True)
class Vectors:
    x: torch.Tensor
    out: torch.Tensor


made: list[weakref.ref[torch.Tensor]] = []
alive: list[int] = []


def vectors(case: Doubling, dtype: torch.dtype, device: torch.device) -> list[Vectors]:
    alive.append(sum(one() is not None for one in made))
    sets = [Vectors(*torch.randn(2, case.size, device=device, dtype=dtype)) for _ in range(2)]
    made.extend(weakref.ref(one.x) for one in sets)
    return sets


BENCHMARK: Benchmark[Doubling, Vectors] = Benchmark(
    section="doubling",
    parse=lambda text: Doubling(int(text[1:])),
    inputs=one_layout_at_a_time(vectors),
    check=sample_check(
        lambda case, one: [Sample("row 0", torch.tensor([0]), 2 * one.x[:1].float())],
        lambda one: one.x.shape,
    ),
    num_bytes=lambda case, dtype: 2 * case.size * dtype.itemsize,
    summary=Summary(peer="peer", rivals=lambda ours, name: not name.startswith(OURS)),
    peers={},
)
OURS_FP32 = Implementation(
    "ostinato_fp32", torch.float32, each(lambda one: torch.mul(one.x, 2, out=one.out))
)
PEER = Implementation("add", torch.float32, each(lambda one: one.x + one.x), package="torch")


def test_a_small_benchmark_is_checked_timed_and_compared() -> None:

    def odd(case: Doubling) -> str | None:
        return "even sizes" if case.size % 2 else None

    picky = Implementation("picky", torch.float64, each(lambda one: 2 * one.x), refuses=odd)
    lazy = Implementation("ostinato_lazy", torch.float32, each(lambda one: one.out))
    impls = [OURS_FP32, PEER, picky, lazy]
    first, second = time_cases(BENCHMARK, [Doubling(8), Doubling(9)], impls, CPU)
    assert [row.impl for row in first.rows] == ["ostinato_fp32", "add", "picky"]
    assert [(row.section, row.case) for row in second.rows] == [("doubling", "x9")] * 2
    assert second.unsupported == {"picky": "even sizes"}
    # Its output still holds the NaN that it should have overwritten.
    assert first.failures == {
        "ostinato_lazy": "wrong result: row 0 is off by nan, expected 0.01 at most"
    }
    us = {row.impl: row.us for row in first.rows}
    assert first.rows[0].peer == min(("add", "picky"), key=us.__getitem__)
    assert second.rows[0].peer == "add"
    assert first.rows[1].peer is None


def test_a_layout_is_freed_before_the_next_is_made() -> None:
    made.clear()
    alive.clear()
    wide = Implementation("wide", torch.float64, each(lambda one: 2 * one.x))
    list(time_cases(BENCHMARK, [Doubling(8), Doubling(9)], [OURS_FP32, wide], CPU))
    assert alive == [0, 0, 0, 0]


def test_our_refusal_is_a_failure() -> None:
    ours = Implementation("ostinato_fp32", torch.float32, OURS_FP32.bind, refuses=lambda case: "no")
    [result] = time_cases(BENCHMARK, [Doubling(8)], [ours], CPU)
    assert (result.failures, result.unsupported) == ({"ostinato_fp32": "no"}, {})


def test_the_version_of_a_peer_is_that_of_its_package() -> None:
    assert PEER.version == metadata.version("torch")
    assert OURS_FP32.version is None
    assert Implementation("x", None, PEER.bind, package="no-such-package").version is None
