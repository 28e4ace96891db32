"""Sums and concatenations over ranks: processes over gloo, and threads, with the same bits."""

from __future__ import annotations

import gc

import pytest
import torch
from collective_ranks import DTYPES, in_order, over_gloo, reduce_and_gather, share

from effort import effort
from ostinato import ops
from ostinato.ops.collective.communicator import (
    Communicator,
    CommunicatorError,
    GroupCommunicator,
    communicator_of,
    local_communicators,
    run_ranks,
)
from ostinato.ops.collective.partial_sum import PartialSum

SIZES = effort((2,), (2, 4, 8))


@pytest.mark.parametrize("size", SIZES)
def test_processes_and_threads_have_the_same_bits(size: int) -> None:
    local = run_ranks(local_communicators(size), reduce_and_gather)
    for of_process, of_thread in zip(over_gloo(size), local, strict=True):
        for name, value in of_thread.items():
            found = torch.from_numpy(of_process[name])
            assert found.equal(value.view(torch.uint8)), name
        numbers = torch.from_numpy(of_process["numbers"]).view(torch.int64)
        assert numbers.tolist() == [[rank, 7] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_rank_order_and_alike(size: int, dtype: torch.dtype) -> None:
    parts = [share(rank, 5, 48, dtype) for rank in range(size)]
    for found in run_ranks(local_communicators(size), reduce_and_gather):
        assert found[f"sum {dtype}"].equal(in_order(parts))
        assert found[f"row {dtype}"].equal(in_order(parts)[3:4])
        assert found[f"columns {dtype}"].equal(torch.cat([part[:, :7] for part in parts], 1))


def test_sums_of_rows_with_strides_and_in_place() -> None:
    parts = [share(rank, 4, 32, torch.float32) for rank in range(2)]

    def add(ranks: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        x = parts[ranks.rank].repeat(1, 2)[:, :32]
        strided = PartialSum(x, ranks).sum()
        assert ops.all_reduce(x, ranks, out=x) is x
        return strided, x

    for strided, in_place in run_ranks(local_communicators(2), add):
        assert strided.equal(in_order(parts))
        assert in_place.equal(in_order(parts))


def test_no_rows_need_no_rank() -> None:
    ranks = local_communicators(2)[0]
    assert ranks.all_reduce(torch.empty(0, 8)).shape == (0, 8)
    assert ranks.all_gather(torch.empty(0, 8)).shape == (0, 16)


def test_a_rank_that_fails_ends_the_others() -> None:
    def fail(ranks: Communicator) -> torch.Tensor:
        if ranks.rank == 1:
            raise OverflowError("too much")
        return ranks.all_reduce(torch.ones(1, 4))

    with pytest.raises((OverflowError, CommunicatorError), match="too much"):
        run_ranks(local_communicators(3), fail)


def test_a_rank_that_does_not_come_is_waited_for_a_time() -> None:
    ranks = local_communicators(2, timeout_s=0.1)[0]
    with pytest.raises(CommunicatorError, match=r"rank 0 of 2 waits in vain: .* within 0.1 s"):
        ranks.all_reduce(torch.ones(1, 4))


def test_ranks_with_different_shapes_all_end() -> None:
    with pytest.raises(CommunicatorError, match=r"has \[\d, 4\] torch.float32, another \[\d, 4\]"):
        run_ranks(local_communicators(2), lambda r: r.all_reduce(torch.ones(1 + r.rank, 4)))


def test_bad_arguments_are_named_before_anything_is_sent() -> None:
    ranks = local_communicators(2)[0]
    with pytest.raises(TypeError, match="x: got list, expected a tensor"):
        ranks.all_reduce([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x: got dtype torch.int32, expected torch.bfloat16"):
        ranks.all_reduce(torch.ones(1, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"x: got shape \[4\], expected \[T, H\]"):
        ranks.all_gather(torch.ones(4))
    with pytest.raises(ValueError, match="x: got H = 0, expected at least 1"):
        ranks.all_reduce(torch.ones(3, 0))
    with pytest.raises(ValueError, match="x: got a tensor on meta, expected one on cpu"):
        ranks.all_reduce(torch.ones(3, 4, device="meta"))
    with pytest.raises(ValueError, match=r"out: got shape \[1, 4\], expected \[2, 4\]"):
        ops.all_reduce(torch.ones(2, 4), ranks, out=torch.ones(1, 4))
    with pytest.raises(TypeError, match="communicator: got str, expected a Communicator"):
        ops.all_gather(torch.ones(2, 4), ranks.name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size: got 0, expected at least 1"):
        local_communicators(0)
    with pytest.raises(ValueError, match="timeout_s: got 0, expected a number above 0"):
        local_communicators(2, timeout_s=0)
    with pytest.raises(RuntimeError, match="group: got None without a default group"):
        GroupCommunicator()


def test_names_find_communicators_that_live() -> None:
    ranks = local_communicators(1)
    name = ranks[0].name
    assert communicator_of(name) is ranks[0]
    del ranks
    gc.collect()
    with pytest.raises(ValueError, match=f"communicator: got '{name}', expected the name of one"):
        communicator_of(name)
