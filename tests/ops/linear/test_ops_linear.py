"""Linear layers, 16/32-bit and W8A8, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_cases import E4M3, FLOATS, assert_close, assert_same_bits, quantized_randn

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")

SHAPES = [(1, 1, 1), (0, 4, 8), (1, 33, 65), (7, 5, 130), (8, 64, 64), (9, 31, 16), (70, 24, 40)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(
    dtype: torch.dtype, shape: tuple[int, int, int], bias: bool, device: torch.device
) -> None:
    rows, columns, depth = shape
    x = torch.randn(rows, depth).to(dtype).to(device)
    w = torch.randn(columns, depth).to(dtype).to(device)
    b = torch.randn(columns).to(dtype).to(device) if bias else None
    assert_close(ops.linear(x, w, bias=b), lambda dt: reference.linear(x, w, bias=b, dtype=dt))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp32_results_are_not_rounded_to_the_operands_dtype(
    dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device
) -> None:
    rows, columns, depth = shape
    x = torch.randn(rows, depth).to(dtype).to(device)
    w = torch.randn(columns, depth).to(dtype).to(device)
    for bias in (None, torch.randn(columns, device=device), torch.randn(columns).to(x)):
        y = ops.linear(x, w, bias=bias, out_dtype=torch.float32)
        assert y.dtype is torch.float32
        assert_close(y, lambda dt, b=bias: reference.linear(x, w, bias=b, dtype=dt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 4, 8), (3, 33, 65), (20, 16, 128)], ids=str)
def test_packed_16_bit_weights_give_the_bits_of_plain_ones(
    dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device
) -> None:
    rows, columns, depth = shape
    x = torch.randn(rows, depth).to(dtype).to(device)
    w = torch.randn(columns, depth).to(dtype).to(device)
    for out_dtype in (dtype, torch.float32):
        plain = ops.linear(x, w, out_dtype=out_dtype)
        assert_same_bits(ops.linear(x, ops.pack_weight(w), out_dtype=out_dtype), plain)


def test_padding_of_linear_changes_no_real_row(device: torch.device) -> None:
    x, w = torch.randn(5, 16, device=device).bfloat16(), torch.randn(7, 16, device=device)
    expected = ops.linear(x, w.bfloat16())
    x[3:] = torch.nan
    n_active = torch.tensor([3], dtype=torch.int32, device=device)
    y = ops.linear(x, w.bfloat16(), n_active=n_active)
    assert_same_bits(y[:3], expected[:3])


def test_linear_honours_strides(device: torch.device) -> None:
    x = torch.randn(5, 3, 20, device=device)[:, 1, :12]
    w = torch.randn(9, 30, device=device)[::2, 3:15]
    out = torch.zeros(5, 11, device=device)[:, 4:9]
    assert ops.linear(x, w, out=out) is out
    assert_close(out, lambda dtype: reference.linear(x, w, dtype=dtype))
    assert_same_bits(ops.linear(x, w), out)


def test_linear_without_columns_or_depth(device: torch.device) -> None:
    assert ops.linear(torch.ones(3, 4).to(device), torch.ones(0, 4).to(device)).shape == (3, 0)
    empty = torch.ones(3, 0, device=device)
    bias = torch.tensor([1.0, 2.0], device=device)
    assert_same_bits(ops.linear(empty, empty[:2], bias=bias), bias.expand(3, 2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_of_a_torch_without_onednn(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    x, w = torch.randn(5, 40).to(dtype), torch.randn(7, 40).to(dtype)
    y = ops.linear(x, w)
    assert_close(y, lambda dt: reference.linear(x, w, dtype=dt))
    assert_same_bits(ops.linear(x[3:4], w), y[3:4])


def w8a8(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns, depth = shape
    return (
        quantized_randn((rows, depth), dtype).to(device),
        quantized_randn((columns, depth), dtype).to(device),
        (torch.rand(rows) / 64 + 0.01).to(device),
        (torch.rand(columns) / 64 + 0.01).to(device),
    )


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_w8a8(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    out_dtype: torch.dtype,
    device: torch.device,
) -> None:
    args = w8a8(shape, dtype, device)
    for bias in (None, torch.randn(shape[1], device=device)):
        y = ops.w8a8_linear(*args, bias=bias, out_dtype=out_dtype)
        assert y.dtype is out_dtype
        rounded = None if bias is None else bias.to(out_dtype)
        expected = reference.w8a8_linear(*args, bias=rounded, dtype=torch.float64)
        size = (args[0].double().abs() @ args[1].double().abs().t()).amax() if y.numel() else 0
        # FP8 tensor cores keep about 13 bits of the running sum.
        sums = 2.0**-12 if dtype is E4M3 and device.type == "cuda" else 2.0**-20
        slack = sums * float(size) * float(args[2].amax() * args[3].amax() if y.numel() else 0)
        torch.testing.assert_close(
            y.double(), expected, rtol=torch.finfo(out_dtype).eps, atol=slack + 1e-6
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_accumulators_are_exact(shape: tuple[int, int, int], device: torch.device) -> None:
    x, w, _, _ = w8a8(shape, torch.int8, device)
    one = torch.ones((), device=device)
    acc = ops.w8a8_linear(x, w, one, one, out_dtype=torch.float32)
    expected = x.double() @ w.double().t()
    assert_same_bits(acc, expected.float())


@pytest.mark.parametrize("extreme", [-128, 127])
def test_int8_extremes(extreme: int, device: torch.device) -> None:
    x = torch.full((3, 4096), extreme, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    acc = ops.w8a8_linear(x, x, one, one, out_dtype=torch.float32)
    assert (acc == 4096 * extreme * extreme).all()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("given_sum", [False, True])
def test_asymmetric_int8(per_token: bool, given_sum: bool, device: torch.device) -> None:
    x, w, x_scale, w_scale = w8a8((6, 10, 33), torch.int8, device)
    shape = (6,) if per_token else ()
    zero = torch.randint(-128, 128, shape, dtype=torch.int32, device=device)
    w_sum = w.sum(1, dtype=torch.int32) if given_sum else None
    bias = torch.randn(10, device=device)
    y = ops.w8a8_linear(
        x, w, x_scale, w_scale, bias=bias, x_zero_point=zero, w_sum=w_sum, out_dtype=torch.float32
    )
    real = x_scale[:, None] * (x.double() - zero.reshape(-1, 1))
    expected = real @ (w_scale[:, None] * w.double()).t() + bias
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_scalar_scales_equal_vectors_of_them(dtype: torch.dtype, device: torch.device) -> None:
    x, w, _, _ = w8a8((3, 5, 16), dtype, device)
    x_scale, w_scale = torch.tensor(0.03, device=device), torch.tensor([0.2], device=device)
    y = ops.w8a8_linear(x, w, x_scale, w_scale)
    vectors = x_scale.expand(3).contiguous(), w_scale.expand(5).contiguous()
    assert_same_bits(y, ops.w8a8_linear(x, w, *vectors))


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_w8a8_honours_strides_and_out(dtype: torch.dtype, device: torch.device) -> None:
    x, w, x_scale, w_scale = w8a8((4, 6, 50), dtype, device)
    x, w = x[:, 3:40], w[:, 3:40]
    out = torch.zeros(4, 20, dtype=torch.bfloat16, device=device)[:, 5:11]
    assert ops.w8a8_linear(x, w, x_scale, w_scale, out=out) is out
    assert_same_bits(out, ops.w8a8_linear(x.contiguous(), w.contiguous(), x_scale, w_scale))


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_w8a8_takes_rows_that_share_memory(dtype: torch.dtype, device: torch.device) -> None:
    x, w, x_scale, w_scale = w8a8((4, 6, 64), dtype, device)
    slid = [a.as_strided((a.size(0), 16), (3, 1)) for a in (x, w)]
    for rows in ((x[:1].expand(4, -1), w), (x, w[:1].expand(6, -1)), slid):
        copies = [a.clone(memory_format=torch.contiguous_format) for a in rows]
        expected = ops.w8a8_linear(*copies, x_scale, w_scale)
        assert_same_bits(ops.w8a8_linear(*rows, x_scale, w_scale), expected)
    alone = torch.as_strided(x, (1, 64), (0, 1))
    expected = ops.w8a8_linear(x[:1], w, x_scale[:1], w_scale)
    assert_same_bits(ops.w8a8_linear(alone, w, x_scale[:1], w_scale), expected)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 4, 8), (3, 33, 130), (20, 16, 128)], ids=str)
def test_packed_weights_give_the_bits_of_plain_ones(
    dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device
) -> None:
    x, w, x_scale, w_scale = w8a8(shape, dtype, device)
    options = {"bias": torch.randn(shape[1], device=device), "batch_invariant": True}
    plain = ops.w8a8_linear(x, w, x_scale, w_scale, **options)
    assert_same_bits(ops.w8a8_linear(x, ops.pack_weight(w), x_scale, w_scale, **options), plain)
    if dtype is torch.int8:
        zero = torch.tensor(-7, dtype=torch.int32, device=device)
        plain, packed = (
            ops.w8a8_linear(x, weight, x_scale, w_scale, x_zero_point=zero)
            for weight in (w, ops.pack_weight(w))
        )
        assert_same_bits(packed, plain)


def test_no_channels_are_no_work(device: torch.device) -> None:
    x, w, x_scale, _ = w8a8((3, 4, 8), torch.int8, device)
    assert ops.w8a8_linear(x, w[:0], x_scale, torch.ones((), device=device)).shape == (3, 0)


def test_an_fp32_bias_is_rounded_first(device: torch.device) -> None:
    x, w, x_scale, w_scale = w8a8((3, 4, 8), torch.int8, device)
    bias = torch.randn(4, device=device)
    y = ops.w8a8_linear(x, w, x_scale, w_scale, bias=bias)
    assert_same_bits(y, ops.w8a8_linear(x, w, x_scale, w_scale, bias=bias.bfloat16()))


def test_fp8_nan_reaches_its_row_only(device: torch.device) -> None:
    x, w, x_scale, w_scale = w8a8((3, 5, 16), E4M3, device)
    poisoned = x.float()
    poisoned[1, 2] = float("nan")
    y = ops.w8a8_linear(poisoned.to(E4M3), w, x_scale, w_scale)
    assert y[1].isnan().all()
    assert_same_bits(y[[0, 2]], ops.w8a8_linear(x, w, x_scale, w_scale)[[0, 2]])


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": 1.0}, TypeError, "x: got float, expected a tensor"),
        ({"x": torch.zeros(2, 4).long()}, TypeError, "x: got dtype torch.int64"),
        ({"x": torch.zeros(4)}, ValueError, r"x: got shape \[4\], expected \[M, K\]"),
        ({"x": torch.zeros(2, 8)[:, ::2]}, ValueError, "x: got strides"),
        ({"w": torch.zeros(3, 5)}, ValueError, r"w: got shape \[3, 5\], expected \[N, 4\]"),
        ({"w": torch.zeros(3, 4).half()}, TypeError, "w: got dtype torch.float16"),
        ({"bias": torch.zeros(2)}, ValueError, r"bias: got shape \[2\], expected \[3\]"),
        ({"bias": torch.zeros(3).half()}, TypeError, "bias: got dtype"),
        ({"w": ops.pack_weight(torch.zeros(3, 4).half())}, TypeError, "w: got dtype torch.float16"),
        ({"n_active": torch.zeros(1)}, TypeError, "n_active: got dtype torch.float32"),
        (
            {"out_dtype": torch.float16},
            TypeError,
            "out_dtype: got torch.float16, expected",
        ),
        ({"out": torch.zeros(2, 2)}, ValueError, "out: got shape"),
        ({"out": torch.zeros(2, 3).half()}, TypeError, "out: got dtype"),
        ({"out": torch.zeros(1, 3).expand(2, 3)}, ValueError, r"out: got strides \[0, 1\] for"),
        ({"stream": 7}, ValueError, "stream: got 7"),
    ],
)
def test_linear_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ops.linear(**{"x": torch.zeros(2, 4), "w": torch.zeros(3, 4), **changes})


HALF = torch.zeros(2, 4).half()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"out_dtype": torch.bfloat16}, TypeError, "out_dtype: got torch.bfloat16, expected"),
        ({"bias": torch.zeros(3)}, TypeError, "bias: got dtype torch.float32"),
        ({"out": torch.zeros(2, 3)}, TypeError, "out: got dtype torch.float32"),
        (
            {"w": ops.pack_weight(HALF[:, :3])},
            ValueError,
            r"w: got shape \[2, 3\], expected \[N, 4\]",
        ),
    ],
)
def test_16_bit_linear_bad_input(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ops.linear(**{"x": HALF, "w": torch.zeros(3, 4).half(), **changes})


def test_k_of_16_bits_beyond_32_bits_of_bytes() -> None:
    x, w = (torch.empty(rows, 2**30, dtype=torch.bfloat16, device="meta") for rows in (1, 8))
    with pytest.raises(ValueError, match="x: got bytes of K = 2147483648, expected at most"):
        ops.linear(x, w)


INT8 = torch.zeros(2, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": torch.zeros(2, 4)}, TypeError, "x: got dtype torch.float32, expected torch.int8 or"),
        ({"w": torch.zeros(3, 4).to(E4M3)}, TypeError, "w: got dtype torch.float8_e4m3fn"),
        ({"w": INT8[:, :3]}, ValueError, r"w: got shape \[2, 3\]"),
        ({"w": INT8.t()[:, :2]}, ValueError, r"w: got shape \[4, 2\]"),
        ({"w": torch.zeros(4, 3).char().t()}, ValueError, r"w: got strides \[1, 3\]"),
        ({"w": torch.zeros(3, 4).char().to("meta")}, ValueError, "w: got a tensor on meta"),
        (
            {"w": ops.pack_weight(INT8[:, :3])},
            ValueError,
            r"w: got shape \[2, 3\], expected \[N, 4\]",
        ),
        ({"w": ops.pack_weight(INT8.to(E4M3))}, TypeError, "w: got dtype torch.float8_e4m3fn"),
        ({"w": None}, TypeError, "w: got NoneType, expected a tensor"),
        ({"x": torch.zeros(2, 8).char()[:, ::2]}, ValueError, "x: got strides"),
        ({"x": INT8[:, :0]}, ValueError, "x: got K = 0, expected at least 1"),
        ({"x_scale": torch.ones(2).to("meta")}, ValueError, "x_scale: got a tensor on meta"),
        ({"fast_accum": 1}, TypeError, "fast_accum: got int, expected a bool"),
        ({"check_scales": 0}, TypeError, "check_scales: got int, expected a bool"),
        ({"batch_invariant": None}, TypeError, "batch_invariant: got NoneType"),
        ({"x_scale": torch.ones(3)}, ValueError, r"x_scale: got shape \[3\], expected \[2\]"),
        ({"x_scale": torch.ones(2, 1)}, ValueError, "x_scale: got shape"),
        ({"x_scale": 0.5}, TypeError, "x_scale: got float"),
        ({"w_scale": torch.ones(2)}, ValueError, r"w_scale: got shape \[2\], expected \[3\]"),
        ({"w_scale": torch.ones(3).bfloat16()}, TypeError, "w_scale: got dtype"),
        ({"bias": torch.ones(3).half()}, TypeError, "bias: got dtype torch.float16"),
        ({"bias": torch.ones(2)}, ValueError, "bias: got shape"),
        ({"x_zero_point": torch.ones(())}, TypeError, "x_zero_point: got dtype torch.float32"),
        ({"w_sum": torch.ones(3).int()}, ValueError, "w_sum: got a tensor, expected None without"),
        ({"n_active": torch.ones(1)}, TypeError, "n_active: got dtype torch.float32"),
        ({"n_active": torch.ones(2).int()}, ValueError, "n_active: got shape"),
        (
            {"x_zero_point": torch.ones(()).int(), "w_sum": torch.ones(3)},
            TypeError,
            "w_sum: got dtype torch.float32",
        ),
        (
            {
                "x": INT8.to(E4M3),
                "w": torch.zeros(3, 4).to(E4M3),
                "x_zero_point": torch.ones(()).int(),
            },
            ValueError,
            "x_zero_point: got a tensor, expected None for torch.float8_e4m3fn",
        ),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype: got torch.int32"),
        ({"out": torch.zeros(2, 3)}, TypeError, "out: got dtype torch.float32"),
        ({"out": torch.zeros(3, 3).bfloat16()}, ValueError, "out: got shape"),
        ({"out": torch.zeros(1, 3).bfloat16().expand(2, 3)}, ValueError, "out: got strides"),
        ({"stream": 7}, ValueError, "stream: got 7"),
    ],
)
def test_w8a8_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {
        "x": INT8,
        "w": torch.zeros(3, 4, dtype=torch.int8),
        "x_scale": torch.ones(2),
        "w_scale": torch.ones(3),
    }
    with pytest.raises(error, match=match):
        ops.w8a8_linear(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("x", "w", "match"),
    [
        ((2**31 - 1024, 16), (8, 16), "x: got M = 2147482624, expected at most 2147482623"),
        ((1, 2**31), (8, 2**31), "x: got K = 2147483648"),
        ((1, 16), (2**31, 16), "w: got N = 2147483648"),
        ((2**24, 16), (2**15 + 1, 16), "x: got M = 16777216 with N = 32769, expected at most"),
    ],
)
def test_sizes_beyond_32_bits(x: tuple[int, int], w: tuple[int, int], match: str) -> None:
    sizes = (torch.empty(size, dtype=torch.int8, device="meta") for size in (x, w))
    one = torch.ones((), device="meta")
    with pytest.raises(ValueError, match=match):
        ops.w8a8_linear(*sizes, one, one)


@pytest.mark.parametrize(("zero_point", "code", "most"), [(None, -128, 131071), (-128, 127, 65793)])
def test_int8_sums_stay_within_32_bits(
    zero_point: int | None, code: int, most: int, device: torch.device
) -> None:
    x = torch.full((2, most), code, dtype=torch.int8, device=device)
    w = torch.full((16, most), -128, dtype=torch.int8, device=device)
    one = torch.ones((), device=device)
    asymmetric = {} if zero_point is None else {"x_zero_point": torch.tensor(zero_point).int()}
    more = {name: value.to(device) for name, value in asymmetric.items()}
    got = ops.w8a8_linear(x, w, one, one, out_dtype=torch.float32, **more)
    assert (got == torch.tensor(float((code - (zero_point or 0)) * -128 * most))).all()
    wide = torch.zeros(2, most + 1, dtype=torch.int8, device=device)
    with pytest.raises(ValueError, match=f"x: got K = {most + 1}, expected at most {most}"):
        ops.w8a8_linear(wide, wide, one, one, **more)
    ops.w8a8_linear(*(wide.to(torch.float8_e4m3fn),) * 2, one, one)


@pytest.mark.parametrize("bad", [-129, 400])
def test_zero_points_beyond_int8_are_refused(bad: int, device: torch.device) -> None:
    x, w, x_scale, w_scale = w8a8((3, 5, 16), torch.int8, device)
    zero = torch.tensor([0, 3, -128], dtype=torch.int32, device=device)
    ops.w8a8_linear(x, w, x_scale, w_scale, x_zero_point=zero, check_scales=True)
    zero[1] = bad
    message = f"x_zero_point: got {bad}, expected -128 to 127"
    with pytest.raises(ValueError, match=message):
        ops.w8a8_linear(x, w, x_scale, w_scale, x_zero_point=zero, check_scales=True)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=message):
            ops.w8a8_linear(x, w, x_scale, w_scale, x_zero_point=zero[1])


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["x_scale", "w_scale"])
def test_scales_are_checked_where_asked(name: str, bad: float, device: torch.device) -> None:
    x, w, x_scale, w_scale = w8a8((3, 5, 16), torch.int8, device)
    out = torch.ones(3, 5, dtype=torch.bfloat16, device=device)
    scales = {"x_scale": x_scale, "w_scale": w_scale}
    scales[name][2] = bad
    with pytest.raises(ValueError, match=f"{name}: got {bad}, expected finite numbers at least 0"):
        ops.w8a8_linear(x, w, **scales, check_scales=True, out=out)
    assert (out == 1).all()
    scales[name][2] = 0
    ops.w8a8_linear(x, w, **scales, check_scales=True, out=out)
