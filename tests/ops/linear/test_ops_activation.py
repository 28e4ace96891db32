"""Activation functions, alone and fused with quantisation."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from ops_cases import E4M3, FLOATS, assert_close, assert_same_bits, int32
from ops_kernels import ROW_FUNCTIONS

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.linear.quantize_cuda import ACTIVATIONS, GATED

pytestmark = pytest.mark.usefixtures("kernels")


def rows(kind: str, m: int, k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return random numbers of which `kind` makes [m, k]."""
    return (torch.randn(m, 2 * k if kind in GATED else k) * 4).to(dtype).to(device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (3, 33), (9, 64), (2, 700)], ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_function(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    x = rows(kind, *shape, dtype, device)
    found = ops.activation(x, kind)
    assert found.shape == shape
    assert_close(found, lambda dt: reference.activation(x, kind, dtype=dt))


# Of torch.nn.functional, in fp64.
THEIRS: dict[str, Any] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_functions_are_those_of_torch(kind: str) -> None:
    x = torch.randn(4, 40, dtype=torch.float64) * 3
    gate, up = x.chunk(2, dim=1) if kind in GATED else (x, torch.ones(()))
    wanted = THEIRS[kind.removesuffix("_mul")](gate) * up
    torch.testing.assert_close(reference.activation(x, kind, dtype=torch.float64), wanted)


# Numbers far out, and on both sides of where kernels change their way of computing.
FAR = (0.0, 1e-30, 1e-4, 0.5, 3.0, 9.4, 9.6, 12.0, 40.0, 79.0, 81.0, 90.0, 1e4, 1e15, 1e30)


@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind not in GATED])
def test_numbers_of_all_sizes(kind: str, device: torch.device) -> None:
    x = torch.tensor(FAR, device=device)
    x = torch.stack([x, -x])
    wanted = reference.activation(x, kind, dtype=torch.float64).float()
    found = ops.activation(x, kind)
    # Left of the smallest normal number of 1 + erf both are nothing beside the row.
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=3e-6)
    assert not found.isnan().any()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_nan_stays_in_its_place(kind: str, device: torch.device) -> None:
    x = rows(kind, 2, 40, torch.float32, device)
    x[0, 3] = math.nan
    found = ops.activation(x, kind)
    assert found.isnan().nonzero().tolist() == [[0, 3]]


def test_infinity_is_passed_on_or_zero(device: torch.device) -> None:
    x = torch.tensor([[math.inf, 1.0]], device=device)
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        assert ops.activation(x, kind)[0, 0] == math.inf
    assert ops.activation(-x, "relu").tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["gelu_tanh_mul", "relu2"])
def test_strides_and_out(kind: str, device: torch.device) -> None:
    width = 40 if kind in GATED else 20
    x = torch.randn(5, 3, 50, device=device)[::2, 1, 4 : 4 + width]
    out = torch.zeros(3, 50, device=device)[:, 10:30]
    assert ops.activation(x, kind, out=out) is out
    assert_same_bits(out, ops.activation(x.contiguous(), kind))


def test_silu_mul_is_a_kind_of_activation(device: torch.device) -> None:
    x = torch.randn(3, 64, device=device)
    assert_same_bits(ops.silu_mul(x), ops.activation(x, "silu_mul"))
    for dtype in (torch.int8, E4M3):
        pairs = zip(
            ops.silu_mul_quantize(x, dtype),
            ops.activation_quantize(x, "silu_mul", dtype),
            strict=True,
        )
        for found, wanted in pairs:
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("kind", ROW_FUNCTIONS)
def test_fused_equals_separate_in_fp32(
    kind: str, dtype: torch.dtype, static: bool, device: torch.device
) -> None:
    x = rows(kind, 5, 300, torch.float32, device)
    scale = torch.tensor(0.03, device=device) if static else None
    zero = torch.tensor(-7, dtype=torch.int32, device=device) if static else None
    options = {"scale": scale, "zero_point": zero if dtype is torch.int8 else None}
    values, scales = ops.activation_quantize(x, kind, dtype, **options)
    y = ops.activation(x, kind)
    if scale is None:
        wanted, wanted_scales = ops.quantize_per_token(y, dtype)
    else:
        wanted, wanted_scales = ops.quantize_per_tensor(y, dtype=dtype, **options), scale.expand(5)
    assert_same_bits(values, wanted)
    assert_same_bits(scales, wanted_scales.clone())


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("kind", ROW_FUNCTIONS)
def test_codes_are_those_of_the_reference(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = rows(kind, 7, 520, torch.bfloat16, device)
    values, scale = ops.activation_quantize(x, kind, dtype)
    wanted, wanted_scale = reference.activation_quantize(x, kind, dtype)
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0.0)
    ours, theirs = values.float(), wanted.float()
    assert ((ours - theirs).abs() <= theirs.abs().clamp(min=8) / 8).all()
    assert (ours != theirs).sum() <= 0.02 * ours.numel()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", ROW_FUNCTIONS)
def test_groups_after_an_activation(kind: str, power_of_two: bool, device: torch.device) -> None:
    x = rows(kind, 5, 328, torch.bfloat16, device)
    y = ops.activation(x.float(), kind)
    wanted, wanted_scale = ops.quantize_per_group(y, power_of_two=power_of_two)
    for discard in (False, True):
        values, scale = ops.activation_quantize_per_group(
            x.clone(), kind, power_of_two=power_of_two, discard_x=discard
        )
        assert_same_bits(values, wanted)
        assert_same_bits(scale, wanted_scale)


# By rows and channels: for the ways in which threads share rows, and rows of no whole lines.
DISCARDED = [(3, 200), (70, 256), (2, 14336), (20, 14336), (300, 4096), (300, 4088), (2, 40000)]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("m", "k"), DISCARDED)
@pytest.mark.parametrize("kind", ["relu2", "gelu_tanh_mul"])
def test_discarding_x_changes_nothing_else(
    kind: str, m: int, k: int, static: bool, device: torch.device
) -> None:
    scale = torch.tensor(0.02, device=device) if static else None
    width = 2 * k if kind in GATED else k
    memory = torch.randn(m + 2, width + 128).bfloat16().to(device)
    before, x = memory.clone(), memory[1:-1, 64 : 64 + width]
    real = int32([m - 1], device)
    expected = ops.activation_quantize(x, kind, torch.int8, scale=scale)
    found = ops.activation_quantize(x, kind, torch.int8, scale=scale, n_active=real, discard_x=True)
    for got, want in zip(found, expected, strict=True):
        assert_same_bits(got[:-1], want[:-1])
    if device.type == "cpu":
        assert x.isnan().all()
    else:
        torch.zeros(64 << 20, device=device)  # more than the L2 holds: all else comes from memory
        assert_same_bits(x[-1], before[-2, 64 : 64 + width])
    x.zero_()
    before[1:-1, 64 : 64 + width] = 0
    assert_same_bits(memory, before)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(FLOATS),
    columns=st.sampled_from([1, 3, 8, 33, 257]),
    chosen=st.lists(st.integers(0, 19), min_size=1, max_size=24),
)
def test_a_row_does_not_depend_on_the_others(
    kind: str, dtype: torch.dtype, columns: int, chosen: list[int], device: torch.device
) -> None:
    x = rows(kind, 20, columns, dtype, device)
    index = torch.tensor(chosen, device=device)
    assert_same_bits(ops.activation(x[index], kind), ops.activation(x, kind)[index])


X = torch.zeros(2, 6)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": None}, TypeError, "x: got NoneType"),
        ({"x": X.double()}, TypeError, "x: got dtype torch.float64"),
        ({"x": X[0]}, ValueError, r"x: got shape \[6\], expected \[M, K\]"),
        ({"x": X[:, :0]}, ValueError, "x: got K = 0"),
        ({"x": X[:, :5], "kind": "gelu_mul"}, ValueError, "x: got 5 columns, expected an even"),
        ({"x": X[:, 0], "kind": "relu_mul"}, ValueError, r"expected \[M, 2\*K\]"),
        ({"kind": "swish"}, ValueError, "kind: got 'swish', expected one of silu, gelu"),
        ({"kind": None}, ValueError, "kind: got None, expected one of"),
        ({"kind": "rms_norm"}, ValueError, "kind: got 'rms_norm', expected one of"),
        ({"stream": 1}, ValueError, "stream: got 1"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {"x": X, "kind": "relu", **changes}
    for call in (
        ops.activation,
        lambda **given: ops.activation_quantize(**given, dtype=torch.int8),
        ops.activation_quantize_per_group,
    ):
        with pytest.raises(error, match=match):
            call(**arguments)


def test_bad_input_of_quantisation() -> None:
    zero = torch.zeros((), dtype=torch.int32)
    for options, error, match in (
        ({"dtype": torch.int16}, TypeError, "dtype: got torch.int16"),
        ({"zero_point": zero}, ValueError, "zero_point: got a tensor without a scale"),
        ({"discard_x": 1}, TypeError, "discard_x: got int"),
        ({"n_active": 3}, TypeError, "n_active: got int"),
    ):
        with pytest.raises(error, match=match):
            ops.activation_quantize(X, "relu2", **{"dtype": torch.int8, **options})
    shared = X[:1].expand(2, 6)
    with pytest.raises(ValueError, match="x: got strides"):
        ops.activation_quantize(shared, "relu2", torch.int8, discard_x=True)
    out = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"out: got shape \[2, 5\], expected \[2, 6\]"):
        ops.activation(X, "gelu", out=out)
