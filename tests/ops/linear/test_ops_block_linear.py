"""FP8 linear layers with a scale for each 128 of K."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from ops_cases import E4M3, FLOATS, assert_same_bits, quantized_randn

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("block_kernels")


def operands(
    m: int, n: int, k: int, device: torch.device, shared: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, w and a scale of every group of a token and of so many channels, all distinct."""
    x, w = (quantized_randn((rows, k), E4M3).to(device) for rows in (m, n))
    x_scale, w_scale = (torch.rand(-(-k // 128), rows) + 0.1 for rows in (m, -(-n // shared)))
    return x, w, x_scale.to(device), w_scale.to(device)


@pytest.mark.parametrize("shared", [8, 128])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, 3, 4), (1, 1, 1), (5, 17, 127), (3, 264, 128), (4, 9, 129), (7, 33, 700)]
)
def test_scaled_products_of_groups(
    m: int, n: int, k: int, out_dtype: torch.dtype, packed: bool, shared: int
) -> None:
    device = torch.device("cpu")
    arguments = operands(m, n, k, device, shared)
    bias = torch.randn(n).to(out_dtype)
    x, w, *scales = arguments
    weight = ops.pack_weight(w) if packed else w
    got = ops.fp8_block_linear(x, weight, *scales, bias=bias, out_dtype=out_dtype)
    assert got.dtype is out_dtype
    exact = reference.fp8_block_linear(*arguments, bias=bias, dtype=torch.float64)
    magnitudes = [operand.float().abs() for operand in (x, w)]
    sizes = reference.fp8_block_linear(*magnitudes, *scales, dtype=torch.float64)
    rounding = torch.finfo(out_dtype).eps / 2 * exact.abs()
    assert (
        (got.double() - exact).abs() <= rounding + 4 * torch.finfo(torch.float32).eps * sizes
    ).all()


def test_every_group_has_its_own_scales(device: torch.device) -> None:
    """Of 300 = 2 · 128 + 44 of K, and of 20 channels: powers of two make every sum exact."""
    m, n, k = 6, 20, 300
    x, w = (torch.randint(-1, 2, (rows, k)).float().to(device) for rows in (m, n))
    x_scale, w_scale = (
        2.0 ** torch.randint(-4, 5, (3, columns)).float().to(device) for columns in (m, 3)
    )
    of_k = torch.arange(k, device=device) // 128
    wide_x = x.double() * x_scale[of_k].t()
    wide_w = w.double() * w_scale[of_k].t().repeat_interleave(8, 0)[:n]
    got = ops.fp8_block_linear(
        x.to(E4M3), w.to(E4M3), x_scale, w_scale, out_dtype=torch.float32, batch_invariant=True
    )
    assert torch.equal(got.double(), wide_x @ wide_w.t())


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 20),
    first=st.integers(0, 19),
    n=st.sampled_from([1, 8, 33, 100]),
    k=st.sampled_from([1, 128, 200, 513]),
)
def test_a_row_has_the_same_bits_in_every_call(
    device: torch.device, rows: int, first: int, n: int, k: int
) -> None:
    x, w, x_scale, w_scale = operands(rows, n, k, device)
    first = min(first, rows - 1)
    whole = ops.fp8_block_linear(x, w, x_scale, w_scale, batch_invariant=True)
    part = ops.fp8_block_linear(x[first:], w, x_scale[:, first:], w_scale, batch_invariant=True)
    assert_same_bits(part, whole[first:])


def test_output_and_strides(device: torch.device) -> None:
    x, w, x_scale, w_scale = operands(5, 24, 256, device)
    expected = ops.fp8_block_linear(x, w, x_scale, w_scale)
    storage = torch.zeros(5, 40, dtype=torch.bfloat16, device=device)
    out = storage[:, 7:31]
    wide = torch.zeros(2, 17, device=device)
    wide[:, 3:8] = x_scale
    assert ops.fp8_block_linear(x, w, wide[:, 3:8], w_scale, out=out) is out
    assert_same_bits(out, expected)
    assert (storage[:, :7] == 0).all()
    assert (storage[:, 31:] == 0).all()


def test_scales_of_joined_weights() -> None:
    """A part's blocks begin at its first row; a rank's part begins within a block."""
    q, k, v = (torch.rand(-(-rows // 128), 3) for rows in (320, 160, 36))
    scales = ops.channel_scales([(q, slice(0, 320)), (k, slice(40, 160)), (v, slice(0, 36))])
    of_channels = torch.cat(
        [
            q.repeat_interleave(128, 0)[:320],
            k.repeat_interleave(128, 0)[40:160],
            v.repeat_interleave(128, 0)[:36],
        ]
    )
    assert scales.shape == (3, 60)
    assert scales.stride(0) % 4 == 0
    assert torch.equal(scales.t().repeat_interleave(8, 0)[:476], of_channels)
    for part in (slice(4, 160), slice(0, 36)):
        with pytest.raises(ValueError, match="expected multiples of 8"):
            ops.channel_scales([(k, part), (v, slice(0, 36))])
    with pytest.raises(ValueError, match="expected multiples of 128"):
        ops.channel_scales([(k, slice(0, 40)), (v, slice(0, 36))], channels=128)
    with pytest.raises(ValueError, match="channels: got 16, expected 8 or 128"):
        ops.channel_scales([(k, slice(0, 40))], channels=16)


@pytest.mark.parametrize("channels", [None, 8, 128])
def test_scales_of_whole_blocks_are_stored_once(channels: int | None) -> None:
    q, v = torch.rand(3, 2), torch.rand(1, 2)
    scales = ops.channel_scales([(q, slice(128, 384)), (v, slice(0, 36))], channels=channels)
    shared = channels or 128
    assert scales.shape == (2, -(-292 // shared))
    of_channels = torch.cat([q[1:].repeat_interleave(128, 0), v.repeat_interleave(36, 0)])
    assert torch.equal(scales.t().repeat_interleave(shared, 0)[:292], of_channels)


X, W = torch.zeros(3, 200).to(E4M3), torch.zeros(20, 200).to(E4M3)
GOOD: dict[str, Any] = {"x": X, "w": W, "x_scale": torch.ones(2, 3), "w_scale": torch.ones(2, 3)}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": X.to(torch.int8)}, TypeError, "x: got dtype torch.int8"),
        ({"x": X[:, :0], "w": W[:, :0]}, ValueError, "x: got K = 0"),
        ({"w": W[:, :100]}, ValueError, r"w: got shape \[20, 100\], expected \[N, 200\]"),
        ({"w": W.float()}, TypeError, "w: got dtype torch.float32"),
        ({"w": ops.pack_weight(W[:, :100])}, ValueError, r"w: got shape \[20, 100\]"),
        ({"w": ops.pack_weight(W.to(torch.int8))}, TypeError, "w: got dtype torch.int8"),
        ({"x_scale": torch.ones(3)}, ValueError, r"x_scale: got shape \[3\], expected \[2, 3\]"),
        ({"x_scale": torch.ones(3, 2)}, ValueError, "x_scale: got shape"),
        ({"x_scale": torch.ones(2, 3).half()}, TypeError, "x_scale: got dtype"),
        ({"x_scale": torch.ones(3, 2).t()}, ValueError, "x_scale: got strides"),
        (
            {"w_scale": torch.ones(2, 20)},
            ValueError,
            r"w_scale: got shape \[2, 20\], expected \[2, 3\] or \[2, 1\]",
        ),
        ({"bias": torch.ones(3)}, ValueError, r"bias: got shape \[3\], expected \[20\]"),
        ({"bias": torch.ones(20).half()}, TypeError, "bias: got dtype torch.float16"),
        ({"n_active": 3}, TypeError, "n_active: got int"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype: got torch.int8"),
        ({"out": torch.ones(3, 20)}, TypeError, "out: got dtype torch.float32"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant: got int"),
        ({"stream": 1}, ValueError, "stream: got 1"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    ops.fp8_block_linear(**GOOD)
    with pytest.raises(error, match=match):
        ops.fp8_block_linear(**{**GOOD, **changes})
