"""Collectives over peer memory: how rows are cut into launches, and what these are given."""

from __future__ import annotations

import pytest
import torch
from ops_launches import Launches, note_launches

from ostinato import ops
from ostinato.ops.collective import peers
from ostinato.ops.collective.collective_cuda import (
    ROW_VECTORS,
    VECTOR,
    Collective,
    collective_kernel,
    fits,
    launches_of,
    least_region,
    width_of,
)
from ostinato.ops.collective.communicator import CommunicatorError
from ostinato.ops.collective.peers import (
    DEFAULT_REGION_BYTES,
    PeerCommunicator,
    connect_peers,
    local_peers,
)

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
MIB = 1 << 20
BUFFERS = (0x1000, 0x2000, 0x3000)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peers, "_host_words", lambda: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(peers, "device_index", lambda device: 0)
    monkeypatch.setattr(peers, "gpu", lambda device: ("", 132))
    return note_launches(monkeypatch, (peers,))


def rank_of(buffers: tuple[int, ...] = BUFFERS, *, region: int = 4 * MIB) -> PeerCommunicator:
    memory = torch.zeros(3 * region, dtype=torch.uint8)
    return PeerCommunicator(1, buffers, memory, lambda: None, timeout_s=2.5)


def rows(count: int, width: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return rows whose address 64 bytes divide, as those of CUDA tensors."""
    storage = torch.zeros(count * width + 64, dtype=dtype)
    skipped = -storage.data_ptr() % 64 // dtype.itemsize
    return storage[skipped : skipped + count * width].view(count, width)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("row_vectors", [1, 512, ROW_VECTORS])
@pytest.mark.parametrize("gathers", [False, True])
def test_launches_hold_all_rows_in_turn(size: int, row_vectors: int, gathers: bool) -> None:
    for region in (least_region(size), 1 << 20):
        for count in (1, 7, 300, 5000):
            first = 0
            for part in launches_of(count, row_vectors, size, region, gathers=gathers):
                assert part.first == first
                assert part.count >= 1
                assert not (gathers and part.two_shot)
                of_each = -(-part.count // size) if part.two_shot else part.count
                used = ((size - 1) * of_each + part.two_shot * part.count) * row_vectors
                assert used <= region
                first += part.count
            assert first == count


@pytest.mark.parametrize(
    ("size", "kib", "two_shot"),
    [(2, 1 << 20, False), (3, 512, False), (3, 700, True), (8, 128, False), (8, 256, True)],
)
def test_many_bytes_take_two_shots(size: int, kib: int, two_shot: bool) -> None:
    count = (kib << 10) // (512 * VECTOR)
    parts = list(launches_of(count, 512, size, 1 << 24))
    assert [part.two_shot for part in parts] == [two_shot] * len(parts)


def test_rows_are_divided_evenly_among_launches() -> None:
    parts = list(launches_of(2048, 1024, 4, DEFAULT_REGION_BYTES // VECTOR))
    assert [part.count for part in parts] == [683, 683, 682]
    (whole,) = launches_of(2048, 1024, 2, DEFAULT_REGION_BYTES // VECTOR)
    assert whole.count == 2048


@pytest.mark.parametrize("elements", [8, 8 * 7, 8 * 2048, 8 * 2049, 8 * 4008, 32064, 128256])
def test_elements_are_cut_into_equal_rows(elements: int) -> None:
    width = width_of(elements, 8)
    assert elements % width == 0
    assert width % 8 == 0
    assert width <= 8 * ROW_VECTORS


def test_rows_fit_that_are_whole_vectors() -> None:
    assert fits(rows(2, 64))
    assert fits(rows(2, 64), rows(2, 64, torch.int8), rows(1, 64, FP32)[0], None)
    assert not fits(rows(2, 60))
    assert not fits(rows(2, 8 * (ROW_VECTORS + 1)))
    assert not fits(rows(2, 65)[:, 1:])
    assert not fits(rows(2, 64), rows(2, 65)[:, :64])
    assert fits(rows(2, 65)[:1, :64])  # of one row the stride says nothing


@pytest.mark.parametrize(
    "name",
    [
        "collective-sum-ranks2-fp32-fp32",
        "collective-gather-ranks8-fp16-fp16",
        "collective-rms_norm-ranks4-bf16-int8-fp32_weight",
        "collective-rms_norm-ranks4-bf16-e4m3-group128",
    ],
)
def test_names_are_those_of_variants(name: str) -> None:
    found = Collective.from_name(name)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "name",
    [
        "collective-sum-ranks3-bf16-bf16",
        "collective-sum-ranks2-bf16-int8",
        "collective-gather-ranks2-bf16-bf16-fp32_weight",
        "collective-rms_norm-ranks2-bf16-int8-group128",
        "collective-layer_norm-ranks2-bf16-bf16",
    ],
)
def test_names_of_no_variant_are_refused(name: str) -> None:
    assert Collective.from_name(name) is None


def test_kernels_serve_so_many_ranks_or_fewer() -> None:
    ranks = [collective_kernel("sum", size, BF16, BF16).ranks for size in (1, 2, 3, 4, 5, 8)]
    assert ranks == [2, 2, 4, 4, 8, 8]


def test_the_control_block_has_the_addresses(launches: Launches) -> None:
    rank = rank_of()
    words = rank._control.view(torch.int64).tolist()
    assert words[:8] == [*BUFFERS, 0, 0, 0, 0, 0]
    assert words[8] == rank._host.data_ptr()
    assert words[9:] == [0, 0]
    assert rank._memory.eq(0xFF).all()


def test_one_launch_does_all(launches: Launches) -> None:
    rank = rank_of()
    x, residual, weight = rows(5, 64), rows(5, 64), rows(1, 64, FP32)[0]
    n_active = torch.tensor([3], dtype=torch.int32)
    more = {"residual": residual, "n_active": n_active}
    out, scale, total = ops.all_reduce_norm_quantize(x, rank, weight, 1e-5, torch.int8, **more)
    [launch] = launches
    variant = "collective-rms_norm-ranks4-bf16-int8-fp32_weight"
    assert launch["variant"].name == variant
    expected = {
        "x": x.data_ptr(),
        "x_stride": 64,
        "out": out.data_ptr(),
        "out_stride": 64,
        "residual": residual.data_ptr(),
        "residual_stride": 64,
        "total": total.data_ptr(),
        "norm_weight": weight.data_ptr(),
        "eps": 1e-5,
        "scale_out": scale.data_ptr(),
        "static_scale": 0,
        "zero_point": 0,
        "n_active": n_active.data_ptr(),
        "m": 5,
        "k": 64,
        "first_row": 0,
        "two_shot": False,
        "rank": 1,
        "size": 3,
        "control": rank._control.data_ptr(),
        "region_vectors": 4 * MIB // VECTOR,
        "sms": 132,
        "timeout_ns": 2_500_000_000,
        "early_successor": True,
    }
    assert {name: launch[name] for name in expected} == expected


def test_many_rows_take_several_launches(launches: Launches) -> None:
    rank = rank_of(region=least_region(3) * VECTOR)
    x, weight = rows(100, 4096), rows(1, 4096)[0]
    codes, scale, total = ops.all_reduce_norm_quantize_per_group(x, rank, weight, 1e-5)
    assert len(launches) > 1
    for launch in launches:
        first = launch["first_row"]
        assert launch["x"] == x[first].data_ptr()
        assert launch["out"] == codes[first].data_ptr()
        assert launch["total"] == total[first].data_ptr()
        assert launch["scale_out"] == scale[0, first:].data_ptr()
        assert launch["scale_stride"] == scale.stride(0)
    assert sum(launch["m"] for launch in launches) == 100


def test_rows_of_odd_width_are_sent_in_vectors(launches: Launches) -> None:
    rank = rank_of()
    ops.all_reduce(rows(3, 7), rank)
    assert [(launch["m"], launch["k"]) for launch in launches] == [(1, 24)]
    launches.clear()
    ops.all_gather(rows(3, 7), rank)
    [launch] = launches
    assert (launch["m"], launch["k"], launch["out_rank_stride"]) == (1, 24, 24)


def test_an_error_of_the_gpu_names_the_rank(launches: Launches) -> None:
    rank = rank_of()
    rank.check()
    rank._host[1] = 3
    with pytest.raises(CommunicatorError, match=r"rank 2 did not come .* within 2.5 s, in which"):
        rank.check()
    rank.reset()
    rank.check()
    rank.stop("for the test")
    assert rank._host.tolist() == [1, 0]
    rank._host[1] = 0x100  # as the GPU answers
    with pytest.raises(CommunicatorError, match="rank 1 of 3 was told to stop waiting"):
        rank.check()


def test_bad_arguments_are_named(launches: Launches) -> None:
    with pytest.raises(ValueError, match="device: got cpu, expected a GPU"):
        local_peers(2, "cpu")
    with pytest.raises(ValueError, match="device: got cpu, expected a GPU"):
        connect_peers(None, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s: got 0"):
        PeerCommunicator(0, BUFFERS, torch.zeros(48, dtype=torch.uint8), lambda: None, timeout_s=0)
