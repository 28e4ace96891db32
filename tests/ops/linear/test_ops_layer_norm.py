"""Layer norm, alone and fused with quantisation."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from ops_cases import E4M3, FLOATS, assert_close, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")


def weights(
    *shape: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    weight, bias = (torch.randn(shape).to(dtype).to(device) for _ in "wb")
    return weight, bias


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (1, 200), (3, 33), (17, 64), (2, 5121)], ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(
    dtype: torch.dtype,
    shape: tuple[int, int],
    weight_dtype: torch.dtype | None,
    has_bias: bool,
    device: torch.device,
) -> None:
    x, residual = (torch.randn(shape).to(dtype).to(device) for _ in "xr")
    weight, bias = weights(shape[1], dtype=weight_dtype or dtype, device=device)
    options = {"bias": bias if has_bias else None}
    got = ops.layer_norm(x, weight, 1e-5, **options)
    assert_close(got, lambda dt: reference.layer_norm(x, weight, 1e-5, **options, dtype=dt))
    options["residual"] = residual
    got, total = ops.layer_norm(x, weight, 1e-5, **options)
    assert_close(got, lambda dt: reference.layer_norm(x, weight, 1e-5, **options, dtype=dt))
    assert_same_bits(total, x + residual)
    assert_same_bits(got, ops.layer_norm(total, weight, 1e-5, bias=options["bias"]))


def test_it_is_that_of_torch(device: torch.device) -> None:
    x = torch.randn(5, 96, device=device)
    weight, bias = weights(96, dtype=torch.float32, device=device)
    wanted = torch.nn.functional.layer_norm(x, (96,), weight, bias, 1e-3)
    torch.testing.assert_close(ops.layer_norm(x, weight, 1e-3, bias=bias), wanted)


@pytest.mark.parametrize("mean", [100.0, -3000.0])
def test_a_large_mean_costs_no_digits(mean: float, device: torch.device) -> None:
    """The mean is subtracted before squares are added up."""
    x = torch.randn(4, 512, device=device) + mean
    ones = torch.ones(512, device=device)
    wanted = reference.layer_norm(x, ones, 0.0, dtype=torch.float64)
    torch.testing.assert_close(ops.layer_norm(x, ones, 0.0).double(), wanted, rtol=0, atol=2e-3)


def test_equal_numbers_become_the_bias(device: torch.device) -> None:
    x = torch.full((2, 64), 0.5, device=device)
    weight, bias = weights(64, dtype=torch.float32, device=device)
    assert_same_bits(ops.layer_norm(x, weight, 1e-5, bias=bias), bias.expand(2, 64).clone())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "k"), [(1, 8), (3, 24), (4, 64), (5, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads_have_weights_of_their_own(
    dtype: torch.dtype, heads: int, k: int, has_bias: bool, device: torch.device
) -> None:
    # A part of wider rows, as q is of qkv.
    x = torch.randn(6, heads * k + 16).to(dtype).to(device)[:, 8:-8].unflatten(1, (heads, k))
    weight, bias = weights(heads, k, dtype=dtype, device=device)
    given = {"bias": bias if has_bias else None}
    out = torch.full((6, heads, k), torch.nan, dtype=dtype, device=device)
    assert ops.layer_norm(x, weight, 1e-5, **given, out=out) is out
    assert_close(out, lambda dt: reference.layer_norm(x, weight, 1e-5, **given, dtype=dt))
    for head in range(heads):
        given = {"bias": bias[head] if has_bias else None}
        alone = ops.layer_norm(x[:, head], weight[head], 1e-5, **given)
        assert_same_bits(out[:, head].contiguous(), alone)


def test_strides_and_out(device: torch.device) -> None:
    x = torch.randn(5, 3, 40, device=device)[::2, 1, 4:24]
    weight, bias = weights(20, dtype=torch.float32, device=device)
    out = torch.zeros(3, 50, device=device)[:, 10:30]
    assert ops.layer_norm(x, weight, 1e-6, bias=bias, out=out) is out
    assert_same_bits(out, ops.layer_norm(x.contiguous(), weight, 1e-6, bias=bias))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_fused_equals_separate_in_fp32(
    dtype: torch.dtype, with_residual: bool, static: bool, device: torch.device
) -> None:
    x, residual = (torch.randn(5, 320, device=device) for _ in "xr")
    weight, bias = weights(320, dtype=torch.float32, device=device)
    scale = torch.tensor(0.03, device=device) if static else None
    added = {"residual": residual} if with_residual else {}
    values, scales, *total = ops.layer_norm_quantize(
        x, weight, 1e-6, dtype, bias=bias, scale=scale, **added
    )
    y = ops.layer_norm(x + residual if with_residual else x, weight, 1e-6, bias=bias)
    assert isinstance(y, torch.Tensor)
    wanted, wanted_scales = reference.quantize(y, dtype, scale, None)
    assert_same_bits(values, wanted)
    assert_same_bits(scales, wanted_scales)
    assert len(total) == with_residual
    if with_residual:
        assert_same_bits(total[0], x + residual)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_codes_are_those_of_the_reference(
    dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(7, 520).bfloat16().to(device)
    weight, bias = weights(520, dtype=weight_dtype, device=device)
    values, scale = ops.layer_norm_quantize(x, weight, 1e-5, dtype, bias=bias)
    wanted, wanted_scale = reference.layer_norm_quantize(x, weight, 1e-5, dtype, bias=bias)
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0.0)
    ours, theirs = values.float(), wanted.float()
    assert ((ours - theirs).abs() <= theirs.abs().clamp(min=8) / 8).all()
    assert (ours != theirs).sum() <= 0.02 * ours.numel()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("columns", [8, 300, 4096])
def test_groups_after_the_norm(
    columns: int, with_residual: bool, power_of_two: bool, device: torch.device
) -> None:
    x, residual = (torch.randn(5, columns, device=device) for _ in "xr")
    weight, bias = weights(columns, dtype=torch.float32, device=device)
    added = {"residual": residual} if with_residual else {}
    values, scale, *total = ops.layer_norm_quantize_per_group(
        x, weight, 1e-5, bias=bias, power_of_two=power_of_two, **added
    )
    y = ops.layer_norm(x + residual if with_residual else x, weight, 1e-5, bias=bias)
    assert isinstance(y, torch.Tensor)
    wanted, wanted_scale = ops.quantize_per_group(y, power_of_two=power_of_two)
    assert_same_bits(values, wanted)
    assert_same_bits(scale, wanted_scale)
    if with_residual:
        assert_same_bits(total[0], x + residual)


def test_static_scales_show_nan(device: torch.device) -> None:
    x = torch.randn(3, 64, device=device)
    x[1, 5] = torch.nan
    ones, scale = torch.ones(64, device=device), torch.tensor(0.02, device=device)
    _, scales = ops.layer_norm_quantize(x, ones, 1e-6, torch.int8, scale=scale)
    assert scales.isnan().tolist() == [False, True, False]
    bias = torch.zeros(64, device=device)
    bias[7] = torch.nan
    _, scales = ops.layer_norm_quantize(x, ones, 1e-6, torch.int8, scale=scale, bias=bias)
    assert scales.isnan().all()


def test_rows_before_the_padding_are_as_ever(device: torch.device) -> None:
    x = torch.randn(5, 512, device=device)
    weight, bias = weights(512, dtype=torch.float32, device=device)
    for real in (5, 2, 0):
        active = int32([real], device)
        for call, options in (
            (ops.layer_norm_quantize, {"dtype": torch.int8}),
            (ops.layer_norm_quantize_per_group, {}),
        ):
            given: dict[str, Any] = {"bias": bias, **options}
            values, scale = call(x, weight, 1e-6, **given, n_active=active)
            wanted, wanted_scale = call(x, weight, 1e-6, **given)
            assert_same_bits(values[:real], wanted[:real])
            assert_same_bits(scale[..., :real], wanted_scale[..., :real])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(FLOATS),
    columns=st.sampled_from([1, 3, 8, 33, 257, 40000]),
    chosen=st.lists(st.integers(0, 19), min_size=1, max_size=24),
)
def test_a_row_does_not_depend_on_the_others(
    dtype: torch.dtype, columns: int, chosen: list[int], device: torch.device
) -> None:
    x = torch.randn(20, columns).to(dtype).to(device)
    weight, bias = weights(columns, dtype=dtype, device=device)
    index = torch.tensor(chosen, device=device)
    whole = ops.layer_norm(x, weight, 1e-5, bias=bias)
    assert isinstance(whole, torch.Tensor)
    assert_same_bits(ops.layer_norm(x[index], weight, 1e-5, bias=bias), whole[index])


X, W = torch.zeros(2, 4), torch.ones(4)
HEADS = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": 3}, TypeError, "x: got int, expected a tensor"),
        ({"x": X.double()}, TypeError, "x: got dtype torch.float64"),
        ({"x": X[0]}, ValueError, r"x: got shape \[4\]"),
        ({"weight": W.half()}, TypeError, "weight: got dtype torch.float16"),
        ({"weight": W[:3]}, ValueError, r"weight: got shape \[3\], expected \[4\]"),
        ({"eps": -1.0}, ValueError, "eps: got -1.0"),
        ({"bias": W[:3]}, ValueError, r"bias: got shape \[3\], expected \[4\]"),
        ({"bias": W.half()}, TypeError, "bias: got dtype torch.float16, expected torch.float32"),
        ({"residual": X[:1]}, ValueError, "residual: got shape"),
        ({"out": X[:1]}, ValueError, "out: got shape"),
        ({"x": HEADS}, ValueError, r"weight: got shape \[4\], expected \[3, 4\]"),
        ({"x": HEADS.transpose(0, 1)}, ValueError, "x: got strides .* heads 4 elements apart"),
        (
            {"x": HEADS, "weight": HEADS[0], "residual": HEADS},
            ValueError,
            "residual: got a tensor, expected None for x with heads",
        ),
        (
            {"x": HEADS, "weight": HEADS[0], "bias": W},
            ValueError,
            r"bias: got shape \[4\], expected \[3, 4\]",
        ),
        (
            {"x": HEADS, "weight": HEADS.repeat(1, 1, 2)[0, :, :4]},
            ValueError,
            "weight: got strides .* heads 4 elements apart",
        ),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": W, "eps": 1e-6, **changes}
    with pytest.raises(error, match=match):
        ops.layer_norm(**arguments)


def test_heads_are_not_quantised() -> None:
    with pytest.raises(ValueError, match=r"x: got shape \[2, 3, 4\], expected \[M, K\]"):
        ops.layer_norm_quantize(HEADS, HEADS[0], 1e-6, torch.int8)
