"""RMS norm and SiLU-gating, alone and fused with quantisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops_cases import E4M3, FLOATS, assert_close, assert_same_bits

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")

SHAPES = [(0, 4), (1, 1), (1, 200), (3, 33), (17, 64)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_rms_norm(
    dtype: torch.dtype,
    shape: tuple[int, int],
    weight_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    x = torch.randn(shape).to(dtype).to(device)
    weight = torch.randn(shape[1]).to(weight_dtype or dtype).to(device)
    got = ops.rms_norm(x, weight, 1e-5)
    assert_close(got, lambda dt: reference.rms_norm(x, weight, 1e-5, dtype=dt))
    residual = torch.randn(shape).to(dtype).to(device)
    got, total = ops.rms_norm(x, weight, 1e-5, residual=residual)
    assert_close(got, lambda dt: reference.rms_norm(x, weight, 1e-5, residual=residual, dtype=dt))
    assert_same_bits(total, x + residual)
    assert_same_bits(got, ops.rms_norm(total, weight, 1e-5))


def test_rms_norm_of_zeros_and_of_large_numbers(device: torch.device) -> None:
    x = torch.tensor([[0.0, 0.0], [3e4, -3e4]], dtype=torch.float16, device=device)
    got = ops.rms_norm(x, torch.ones(2, dtype=torch.float16, device=device), 1e-6)
    assert got.tolist() == [[0.0, 0.0], [1.0, -1.0]]
    assert ops.rms_norm(x.float(), torch.ones(2, device=device), 0.0)[1].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (3, 66), (9, 128)], ids=str)
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    x = (torch.randn(shape) * 4).to(dtype).to(device)
    assert_close(ops.silu_mul(x), lambda dt: reference.silu_mul(x, dtype=dt))


def test_silu_mul_of_large_gates(device: torch.device) -> None:
    x = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 2.0]], device=device)
    assert ops.silu_mul(x).tolist() == [[0.0, 2e4, 0.0]]


def test_strides_and_out(device: torch.device) -> None:
    x = torch.randn(5, 3, 40, device=device)[::2, 1, 4:24]
    weight = torch.randn(20, device=device)
    out = torch.zeros(3, 50, device=device)[:, 10:30]
    assert ops.rms_norm(x, weight, 1e-6, out=out) is out
    assert_same_bits(out, ops.rms_norm(x.contiguous(), weight, 1e-6))
    half = out[:, :10]
    assert ops.silu_mul(x, out=half) is half
    assert_same_bits(half, ops.silu_mul(x.contiguous()))


STATIC: list[dict[str, Any]] = [{}, {"scale": 0.02}, {"scale": 0.02, "zero_point": -5}]


def as_tensors(static: dict[str, Any], device: torch.device) -> dict[str, Any]:
    dtypes = {"scale": torch.float32, "zero_point": torch.int32}
    return {k: torch.tensor(v, dtype=dtypes[k], device=device) for k, v in static.items()}


def check_quantized(
    got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Demand the same scale and values, but for numbers on the edge between two steps."""
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0.0)
    ours, theirs = got[0].float(), expected[0].float()
    assert got[0].dtype == expected[0].dtype
    assert ((ours - theirs).abs() <= theirs.abs().clamp(min=8) / 8).all()
    assert (ours != theirs).sum() <= 0.02 * ours.numel()


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("static", STATIC, ids=str)
def test_fused_quantization(
    x_dtype: torch.dtype, dtype: torch.dtype, static: dict[str, Any], device: torch.device
) -> None:
    if dtype is E4M3:
        static = {k: v for k, v in static.items() if k == "scale"}
    options = as_tensors(static, device)
    x = torch.randn(7, 66).to(x_dtype).to(device)
    weight = torch.randn(66).to(x_dtype).to(device)
    residual = torch.randn(7, 66).to(x_dtype).to(device)

    plain = ops.rms_norm_quantize(x, weight, 1e-6, dtype, **options)
    assert len(plain) == 2
    check_quantized(plain, reference.rms_norm_quantize(x, weight, 1e-6, dtype, **options))
    values, scale, total = ops.rms_norm_quantize(
        x, weight, 1e-6, dtype, residual=residual, **options
    )
    assert_same_bits(total, x + residual)
    expected = reference.rms_norm_quantize(x, weight, 1e-6, dtype, residual=residual, **options)
    check_quantized((values, scale), expected)

    gated = ops.silu_mul_quantize(x, dtype, **options)
    check_quantized(gated, reference.silu_mul_quantize(x, dtype, **options))
    assert scale.shape == gated[1].shape == (7,)
    if static:
        assert_same_bits(scale, options["scale"].expand(7).clone())
        assert_same_bits(gated[1], scale)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_fused_equals_separate_in_fp32(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(5, 32).to(device), torch.randn(32).to(device)
    for fused, separate in (
        (ops.rms_norm_quantize(x, weight, 1e-6, dtype), ops.rms_norm(x, weight, 1e-6)),
        (ops.silu_mul_quantize(x, dtype), ops.silu_mul(x)),
    ):
        values, scale = ops.quantize_per_token(separate, dtype)
        assert_same_bits(fused[0], values)
        assert_same_bits(fused[1], scale)


# By rows and channels: for every way in which threads share rows, and halves of no whole lines.
DISCARDED = [(3, 200), (70, 256), (2, 14336), (20, 14336), (140, 4096), (140, 14336), (300, 14336)]
DISCARDED += [(300, 14328), (2, 40000)]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("rows", "channels"), DISCARDED)
@pytest.mark.parametrize("first", [64, 63])
def test_discarding_x_changes_nothing_else(
    rows: int, channels: int, static: bool, first: int, device: torch.device
) -> None:
    scale = torch.tensor(0.02, device=device) if static else None
    memory = torch.randn(rows + 2, 2 * channels + 128, dtype=torch.float32).bfloat16().to(device)
    before = memory.clone()
    x = memory[1:-1, first : first + 2 * channels]
    real = torch.tensor([rows - 1], dtype=torch.int32, device=device)
    expected = ops.silu_mul_quantize(x, torch.int8, scale=scale)
    found = ops.silu_mul_quantize(x, torch.int8, scale=scale, n_active=real, discard_x=True)
    assert_same_bits(found[0][:-1], expected[0][:-1])
    assert_same_bits(found[1][:-1], expected[1][:-1])
    if device.type == "cpu":
        assert x.isnan().all()
    else:
        torch.zeros(64 << 20, device=device)  # more than the L2 holds: all else comes from memory
        assert_same_bits(x[-1], before[-2, first : first + 2 * channels])
    x.zero_()
    before[1:-1, first : first + 2 * channels] = 0
    assert_same_bits(memory, before)


X, W = torch.zeros(2, 4), torch.zeros(4)
NORM = [
    ({"x": 3}, TypeError, "x: got int, expected a tensor"),
    ({"x": X.int()}, TypeError, "x: got dtype torch.int32"),
    ({"x": torch.zeros(2, 0)}, ValueError, "x: got K = 0"),
    ({"x": torch.zeros(2, 2, 4)}, ValueError, r"x: got shape \[2, 2, 4\], expected \[M, K\]"),
    ({"weight": torch.zeros(3)}, ValueError, r"weight: got shape \[3\], expected \[4\]"),
    ({"weight": W.half()}, TypeError, "weight: got dtype torch.float16"),
    ({"eps": -1e-6}, ValueError, "eps: got -1e-06, expected a finite number of at least 0"),
    ({"eps": math.nan}, ValueError, "eps: got nan"),
    ({"eps": "1e-6"}, TypeError, "eps: got str, expected a number"),
    ({"residual": torch.zeros(1, 4)}, ValueError, "residual: got shape"),
    ({"residual": X.half()}, TypeError, "residual: got dtype"),
    ({"stream": 1}, ValueError, "stream: got 1"),
]
QUANTIZE = [
    ({"dtype": torch.int32}, TypeError, "dtype: got torch.int32"),
    ({"scale": torch.ones(2)}, ValueError, "scale: got shape"),
    ({"scale": torch.ones(()).double()}, TypeError, "scale: got dtype"),
    (
        {"zero_point": torch.ones(()).int()},
        ValueError,
        "zero_point: got a tensor without a scale, expected both or neither",
    ),
    (
        {"scale": torch.ones(()), "zero_point": torch.ones(()).int(), "dtype": E4M3},
        ValueError,
        "zero_point: got a tensor, expected None",
    ),
]


@pytest.mark.parametrize(("changes", "error", "match"), NORM)
def test_rms_norm_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": W, "eps": 1e-6, **changes}
    with pytest.raises(error, match=match):
        ops.rms_norm(**arguments)
    with pytest.raises(error, match=match):
        ops.rms_norm_quantize(**arguments, dtype=torch.int8)


@pytest.mark.parametrize(("changes", "error", "match"), QUANTIZE)
def test_quantize_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {"x": X, "dtype": torch.int8, **changes}
    with pytest.raises(error, match=match):
        ops.silu_mul_quantize(**arguments)
    with pytest.raises(error, match=match):
        ops.rms_norm_quantize(**arguments, weight=W, eps=1e-6)


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        (torch.zeros(2, 3), ValueError, "x: got 3 columns, expected an even number"),
        (torch.zeros(2, 0), ValueError, r"x: got 2\*K = 0"),
        (torch.zeros(4), ValueError, r"x: got shape \[4\]"),
        (torch.zeros(2, 4).double(), TypeError, "x: got dtype torch.float64"),
    ],
)
def test_silu_mul_bad_input(x: torch.Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ops.silu_mul(x)
    with pytest.raises(error, match=match):
        ops.silu_mul_quantize(x, torch.int8)


def test_what_shares_memory_is_not_discarded() -> None:
    x = torch.ones(1, 4).expand(3, 4)
    for rows in (x, torch.ones(8).as_strided((3, 4), (2, 1))):
        with pytest.raises(ValueError, match=r"x: got strides \[[02], 1\]"):
            ops.silu_mul_quantize(rows, torch.int8, discard_x=True)
    with pytest.raises(TypeError, match="discard_x: got int"):
        ops.silu_mul_quantize(x, torch.int8, discard_x=1)  # type: ignore[arg-type]
    assert x.eq(1).all()


def test_bad_outputs() -> None:
    with pytest.raises(ValueError, match="out: got shape"):
        ops.rms_norm(X, W, 1e-6, out=torch.zeros(2, 3))
    with pytest.raises(TypeError, match="out: got dtype"):
        ops.silu_mul(X, out=torch.zeros(2, 2).half())
    with pytest.raises(ValueError, match=r"out: got strides \[0, 1\] for shape \[2, 4\]"):
        ops.rms_norm(X, W, 1e-6, out=torch.zeros(1, 4).expand(2, 4))
    with pytest.raises(ValueError, match="out: got strides"):
        ops.silu_mul(X, out=torch.zeros(1, 2).expand(2, 2))
