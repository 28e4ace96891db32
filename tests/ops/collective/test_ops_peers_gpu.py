"""Ranks that share one GPU, each on a stream of its own: graphs, many rows, ranks that do not come.

Launches of a stream wait for each other, and those of several ranks for what the others send.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from collective_ranks import in_order, share
from ops_cases import assert_same_bits

from effort import effort
from ostinato import _C, ops
from ostinato.jit.compiler import build, plan
from ostinato.jit.mode import BuildMode
from ostinato.ops.collective import peers
from ostinato.ops.collective.collective_cuda import Collective
from ostinato.ops.collective.communicator import Communicator, CommunicatorError
from ostinato.ops.collective.peers import PeerCommunicator, local_peers

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
EPS = 1e-5
PATIENCE_S = 60.0
SIZES = effort((2, 4), (2, 3, 4, 8))


class Ranks:
    """Ranks on one GPU, and their streams."""

    def __init__(self, size: int, *, timeout_s: float = PATIENCE_S) -> None:
        self.peers: list[PeerCommunicator] = []
        # So that many rows take several launches.
        for rank in local_peers(size, DEVICE, timeout_s=timeout_s, region_bytes=16 << 20):
            assert isinstance(rank, PeerCommunicator)
            self.peers.append(rank)
        self.streams = [torch.cuda.Stream(DEVICE) for _ in self.peers]

    def each(self, call: Callable[[Communicator], object], *, but: int = -1) -> list[object]:
        """Have each rank, but for one, launch something on its stream; wait for all of them."""
        torch.cuda.synchronize()
        results = []
        for rank, stream in zip(self.peers, self.streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(None if rank.rank == but else call(rank))
        torch.cuda.synchronize()
        return results

    def check(self) -> None:
        for rank in self.peers:
            rank.check()


def parts_of(size: int, rows: int, width: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [share(rank, rows, width, dtype).to(DEVICE) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8192), (3, 16384), (700, 8192), (2000, 4096)])
def test_sums_of_few_and_of_many_rows(size: int, rows: int, width: int) -> None:
    ranks = Ranks(size)
    parts = parts_of(size, rows, width)
    expected = in_order(parts)
    for _ in range(4):  # regions come again after three
        for found in ranks.each(lambda rank: rank.all_reduce(parts[rank.rank])):
            assert isinstance(found, torch.Tensor)
            assert_same_bits(found, expected)
    ranks.check()


@pytest.mark.parametrize("size", SIZES)
def test_gathers_of_logits_and_of_odd_sizes(size: int) -> None:
    ranks = Ranks(size)
    for rows, width in ((1, 32064), (5, 16032), (64, 1001)):
        parts = parts_of(size, rows, width, torch.float32)
        for found in ranks.each(lambda rank, parts=parts: rank.all_gather(parts[rank.rank])):
            assert isinstance(found, torch.Tensor)
            assert_same_bits(found, torch.cat(parts, 1))
    ranks.check()


@pytest.mark.parametrize("size", SIZES)
def test_graphs_replay_with_other_numbers(size: int) -> None:
    """Replays and launches between them, of other sizes, follow each other in any order."""
    ranks = Ranks(size)
    width, rows = 4096, 4
    weight = torch.randn(width, device=DEVICE).to(BF16)
    held, residual = parts_of(size, rows, width), parts_of(1, rows, width)[0]
    made = {}

    def step(rank: Communicator) -> tuple[torch.Tensor, ...]:
        more = {"residual": residual}
        return ops.all_reduce_norm_quantize(held[rank.rank], rank, weight, EPS, torch.int8, **more)

    ranks.each(step)
    graphs = []
    for rank, stream in zip(ranks.peers, ranks.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            made[rank.rank] = [step(rank) for _ in range(5)]
        graphs.append(graph)
    many = parts_of(size, 600, width)
    for draw in range(effort(20, 300)):
        numbers = [share(10 * draw + rank, rows, width, BF16) for rank in range(size)]
        for tensor, value in zip(held, numbers, strict=True):
            tensor.copy_(value)
        expected = ops.rms_norm_quantize(in_order(held), weight, EPS, torch.int8, residual=residual)
        ranks.each(lambda rank: graphs[rank.rank].replay())
        for results in made.values():
            for result in results:
                for got, want in zip(result, expected, strict=True):
                    assert_same_bits(got, want)
        if draw % 4 == 0:
            for found in ranks.each(lambda rank: rank.all_reduce(many[rank.rank])):
                assert isinstance(found, torch.Tensor)
                assert_same_bits(found, in_order(many))
    ranks.check()


def test_a_launch_without_rows_keeps_nobody_in_step() -> None:
    """A rank that has nothing to wait for must not get ahead: it is as if it were not launched."""
    ranks = Ranks(2, timeout_s=5.0)
    parts, weight = parts_of(2, 3, 4096), torch.ones(4096, dtype=BF16, device=DEVICE)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for _ in range(4):
        with torch.cuda.stream(ranks.streams[0]):
            ops.all_reduce_norm(parts[0], ranks.peers[0], weight, EPS, n_active=none)
        for found in ranks.each(lambda rank: rank.all_reduce(parts[rank.rank])):
            assert isinstance(found, torch.Tensor)
            assert_same_bits(found, in_order(parts))
    ranks.check()


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("site", "rows"),
    [
        ("collective_clear", 3),
        ("collective_clear_two_shots", 700),
        ("quantize_sum_store", 300),
        ("quantize_sum_load", 300),
        ("quantize_maximum_store", 300),
        ("quantize_maximum_load", 300),
    ],
)
def test_injected_delays_change_no_bit(
    site: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more rows than CTAs, each of which uses its shared memory again and again."""
    kernel = Collective(kind="rms_norm", ranks=4, in_dtype="bf16", out_dtype="int8")
    [entry] = build([plan(kernel, BuildMode(delay_site=site))])
    library = _C.Library(str(entry.library))
    library.prepare()
    monkeypatch.setattr(peers, "load", lambda variant, *, device, stream: library)
    ranks = Ranks(3)
    parts, weight = parts_of(3, rows, 8192), torch.randn(8192, device=DEVICE).to(BF16)
    expected = ops.rms_norm_quantize(in_order(parts), weight, EPS, torch.int8)

    def step(rank: Communicator) -> tuple[torch.Tensor, ...]:
        return ops.all_reduce_norm_quantize(parts[rank.rank], rank, weight, EPS, torch.int8)

    for _ in range(4):
        for found in ranks.each(step):
            assert isinstance(found, tuple)
            for got, want in zip(found, expected, strict=False):
                assert_same_bits(got, want)
    ranks.check()


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("rows", [1, 900])
def test_a_rank_that_does_not_come_is_named(missing: int, rows: int) -> None:
    ranks = Ranks(3, timeout_s=1.0)
    parts = parts_of(3, rows, 4096)
    sum_of: Callable[[Communicator], torch.Tensor] = lambda rank: rank.all_reduce(  # noqa: E731
        parts[rank.rank]
    )
    ranks.each(sum_of)
    ranks.check()
    started = time.monotonic()
    found = ranks.each(sum_of, but=missing)
    assert time.monotonic() - started < PATIENCE_S
    for rank, result in zip(ranks.peers, found, strict=True):
        if rank.rank != missing:
            assert isinstance(result, torch.Tensor)
            right = result.view(torch.int16) == in_order(parts).view(torch.int16)
            assert (right | result.isnan()).all()
            assert result.isnan().any()
            with pytest.raises(CommunicatorError, match=f"rank {missing} did not come"):
                rank.check()
    # Nobody waits again, until all begin anew.
    for result in ranks.each(sum_of, but=missing):
        assert result is None or result.isnan().any()  # type: ignore[attr-defined]
    for rank in ranks.peers:
        rank._meet = lambda: None  # they are called one after the other here
        rank.reset()
    for result in ranks.each(sum_of):
        assert isinstance(result, torch.Tensor)
        assert_same_bits(result, in_order(parts))
    ranks.check()


def test_a_rank_stops_waiting_when_it_is_told() -> None:
    ranks = Ranks(2, timeout_s=3600.0)
    x = torch.ones(4, 4096, dtype=BF16, device=DEVICE)
    ranks.each(lambda rank: rank.all_reduce(x))
    with torch.cuda.stream(ranks.streams[0]):
        found = ranks.peers[0].all_reduce(x)
    time.sleep(0.2)
    assert not ranks.streams[0].query()
    ranks.peers[0].stop("for the test")
    torch.cuda.synchronize()
    assert found.isnan().all()
    with pytest.raises(CommunicatorError, match="rank 0 of 2 was told to stop waiting"):
        ranks.peers[0].check()
