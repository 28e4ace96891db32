"""Weights packed for the kernels."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from ops_cases import E4M3, assert_same_bits, quantized_randn

from ostinato import ops
from ostinato.ops.linear import packed_weight

DTYPES = [torch.int8, E4M3, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (16, 128), (17, 129), (5, 64), (48, 300), (1003, 15)]


def random(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype) if dtype.itemsize > 1 else quantized_randn(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_every_byte_has_its_place(
    dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    w = random(shape, dtype)
    packed = ops.pack_weight(w.to(device))
    data = packed.data.cpu().view(torch.int8)
    shape = (shape[0], shape[1] * dtype.itemsize)  # in bytes
    tiles, blocks, rows, depth = data.shape
    assert (rows, depth, blocks % 2) == (16, 64, 0)
    channel = torch.arange(tiles * rows).view(tiles, 1, rows, 1)
    # The vectors of 16 bytes are swizzled, in a way of each pair of rows.
    byte = torch.arange(depth) ^ (torch.arange(rows) // 2 % 4 * 16).unsqueeze(1)
    feature = torch.arange(blocks).view(1, blocks, 1, 1) * depth + byte
    inside = (channel < shape[0]) & (feature < shape[1])
    index = (channel * shape[1] + feature).where(inside, 0)
    expected = w.view(torch.int8).flatten()[index].where(inside, 0)
    assert_same_bits(data, expected.to(torch.int8))


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 300), st.sampled_from(DTYPES))
def test_unpack_undoes_pack(n: int, k: int, dtype: torch.dtype) -> None:
    w = random((n, k), dtype)
    packed = ops.pack_weight(w)
    assert_same_bits(packed.unpack(), w)
    assert (packed.dtype, packed.device, packed.shape) == (dtype, w.device, (n, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(dtype: torch.dtype, device: torch.device) -> None:
    wide = random((40, 300), dtype).to(device)
    for w in (wide[::2, 3:200], wide.t(), wide[:, ::3], wide[:1].expand(5, -1)):
        assert_same_bits(ops.pack_weight(w).unpack(), w)


def test_a_packed_weight_shares_no_memory() -> None:
    w = quantized_randn((16, 128), torch.int8)
    packed = ops.pack_weight(w)
    packed.data.zero_()
    assert w.any()


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_channel_sums(shape: tuple[int, int], device: torch.device) -> None:
    w = quantized_randn(shape, torch.int8).to(device)
    expected = w.int().sum(1, dtype=torch.int32)
    assert_same_bits(packed_weight.channel_sums(w, shape[0]), expected)
    assert_same_bits(packed_weight.channel_sums(ops.pack_weight(w).data, shape[0]), expected)


INT8 = torch.zeros(3, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    ("w", "error", "match"),
    [
        (None, TypeError, "w: got NoneType, expected a tensor"),
        (torch.zeros(3, 4), TypeError, "w: got dtype torch.float32, expected torch.int8 or"),
        (INT8[0], ValueError, r"w: got shape \[4\], expected \[N, K\]"),
        (INT8[:0], ValueError, "w: got N = 0, expected at least 1"),
        (INT8[:, :0], ValueError, "w: got K = 0"),
    ],
)
def test_bad_weights(w: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ops.pack_weight(w)


DATA = torch.zeros(1, 2, 16, 64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"n": 17}, ValueError, r"data: got shape \[1, 2, 16, 64\], expected \[2, 2, 16, 64\]"),
        ({"k": 129}, ValueError, r"data: got shape .*, expected \[1, 4, 16, 64\]"),
        ({"n": 0}, ValueError, "n: got 0, expected at least 1"),
        ({"k": 1.0}, TypeError, "k: got float, expected an int"),
        ({"data": DATA.float()}, TypeError, "data: got dtype torch.float32"),
        ({"data": DATA.half()}, ValueError, r"data: got shape .*, expected \[1, 2, 16, 32\]"),
        ({"data": DATA[0]}, ValueError, r"data: got shape .*, expected \[tiles, blocks, "),
        ({"data": DATA[:, :1].expand(-1, 2, -1, -1)}, ValueError, "data: got strides"),
    ],
)
def test_bad_packed_weights(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ops.PackedWeight(**{"data": DATA, "n": 3, "k": 4, **changes})


def test_traced_code_makes_packed_weights_of_their_data() -> None:
    w = random((24, 40), torch.bfloat16)
    data, x = ops.pack_weight(w).data, torch.randn(3, 40).to(w.dtype)

    def product(x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, ops.PackedWeight(data, 24, 40))

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), ops.linear(x, w))


def test_packed_weights_are_equal_to_themselves_alone() -> None:
    codes = torch.randint(-127, 128, (128, 128), dtype=torch.int8)
    one, other = ops.pack_weight(codes), ops.pack_weight(codes)
    assert one == one
    assert one != other
    assert other not in [one]
