"""Sums over ranks with what follows: the bits of the sum, then of the op by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_ranks import in_order, share
from ops_cases import E4M3, assert_same_bits

from effort import effort
from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.collective.communicator import Communicator, local_communicators, run_ranks
from ostinato.ops.collective.peers import local_peers

ROWS, WIDTH = 5, 384
EPS = 1e-5
DTYPES = effort((torch.bfloat16,), (torch.bfloat16, torch.float16, torch.float32))
SIZES = effort((2,), (1, 2, 3, 4, 8))
Tensors = tuple[torch.Tensor, ...]


def ranks_of(size: int, device: torch.device) -> list[Communicator]:
    if device.type == "cpu":
        return local_communicators(size, timeout_s=60)
    return local_peers(size, device, timeout_s=20)


def on_every_rank(
    size: int, device: torch.device, call: Callable[[Communicator], Tensors]
) -> list[Tensors]:
    """Return what a call gives on each rank, whose work is done."""

    def run(ranks: Communicator) -> Tensors:
        if device.type == "cpu":
            return call(ranks)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            results = call(ranks)
            torch.cuda.current_stream().synchronize()
        ranks.check()  # type: ignore[attr-defined]
        return results

    torch.cuda.synchronize() if device.type == "cuda" else None
    return run_ranks(ranks_of(size, device), run)


def given(
    size: int, dtype: torch.dtype, device: torch.device, width: int = WIDTH
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return each rank's share, the norm's weight and the residual."""
    parts = [share(rank, ROWS, width, dtype).to(device) for rank in range(size)]
    weight, residual = torch.randn(width).to(dtype), torch.randn(ROWS, width).to(dtype)
    return parts, weight.to(device), residual.to(device)


# What follows the sum, and the op by itself: of (x, weight), with a residual.
FORMS: dict[str, tuple[Callable[..., Tensors], Callable[..., Tensors]]] = {
    "norm": (ops.all_reduce_norm, ops.rms_norm),
    "int8": (
        lambda x, ranks, *rest, **more: ops.all_reduce_norm_quantize(
            x, ranks, *rest, torch.int8, **more
        ),
        lambda *rest, **more: ops.rms_norm_quantize(*rest, torch.int8, **more),
    ),
    "e4m3": (
        lambda x, ranks, *rest, **more: ops.all_reduce_norm_quantize(x, ranks, *rest, E4M3, **more),
        lambda *rest, **more: ops.rms_norm_quantize(*rest, E4M3, **more),
    ),
    "groups": (ops.all_reduce_norm_quantize_per_group, ops.rms_norm_quantize_per_group),
}


def alone(form: str, x: torch.Tensor, *rest: Any, residual: torch.Tensor | None) -> Tensors:
    """Return the results of the op by itself, with the sum at the end."""
    found = FORMS[form][1](x, *rest, residual=residual)
    results = found if isinstance(found, tuple) else (found,)
    return results if residual is not None else (*results, x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_residual", [True, False])
def test_bits_are_those_of_the_sum_and_the_op(
    size: int, dtype: torch.dtype, form: str, with_residual: bool, device: torch.device
) -> None:
    parts, weight, residual = given(size, dtype, device)
    total = residual if with_residual else None
    expected = alone(form, in_order(parts), weight, EPS, residual=total)

    def call(ranks: Communicator) -> Tensors:
        return FORMS[form][0](parts[ranks.rank], ranks, weight, EPS, residual=total)

    for found in on_every_rank(size, device, call):
        assert len(found) == len(expected)
        for got, want in zip(found, expected, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_close_to_the_readable_twins(dtype: torch.dtype, device: torch.device) -> None:
    parts, weight, residual = given(2, dtype, device)
    normed, total = on_every_rank(
        2,
        device,
        lambda ranks: ops.all_reduce_norm(parts[ranks.rank], ranks, weight, EPS, residual=residual),
    )[0]
    twin = reference.all_reduce_norm(parts, weight, EPS, residual=residual)
    torch.testing.assert_close(total, twin[1])
    torch.testing.assert_close(normed, twin[0].to(dtype))
    codes, scale, _ = on_every_rank(
        2,
        device,
        lambda ranks: ops.all_reduce_norm_quantize(
            parts[ranks.rank], ranks, weight, EPS, torch.int8, residual=residual
        ),
    )[0]
    of_rows = reference.all_reduce_norm_quantize(parts, weight, EPS, torch.int8, residual=residual)
    torch.testing.assert_close(scale, of_rows[1])
    assert (codes.int() - of_rows[0].int()).abs().amax() <= 1
    values, scales, _ = on_every_rank(
        2,
        device,
        lambda ranks: ops.all_reduce_norm_quantize_per_group(
            parts[ranks.rank], ranks, weight, EPS, residual=residual
        ),
    )[0]
    groups = reference.all_reduce_norm_quantize_per_group(parts, weight, EPS, residual=residual)
    torch.testing.assert_close(scales, groups[1])
    torch.testing.assert_close(values.float(), groups[0].float(), rtol=0.14, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_a_static_scale_is_that_of_quantize_per_tensor(
    dtype: torch.dtype, device: torch.device
) -> None:
    parts, weight, residual = given(2, torch.bfloat16, device)
    fixed = {"scale": torch.tensor(0.02, device=device)}
    if dtype is torch.int8:
        fixed["zero_point"] = torch.tensor(-7, dtype=torch.int32, device=device)
    expected = ops.rms_norm_quantize(
        in_order(parts), weight, EPS, dtype, residual=residual, **fixed
    )

    def call(ranks: Communicator) -> Tensors:
        return ops.all_reduce_norm_quantize(
            parts[ranks.rank], ranks, weight, EPS, dtype, residual=residual, **fixed
        )

    for found in on_every_rank(2, device, call):
        for got, want in zip(found, expected, strict=True):
            assert_same_bits(got, want)


def test_weights_in_fp32_and_powers_of_two(device: torch.device) -> None:
    parts, weight, residual = given(2, torch.bfloat16, device)
    weight = weight.float() + 1e-3
    how = {"residual": residual, "power_of_two": True}
    expected = ops.rms_norm_quantize_per_group(in_order(parts), weight, EPS, **how)

    def call(ranks: Communicator) -> Tensors:
        return ops.all_reduce_norm_quantize_per_group(parts[ranks.rank], ranks, weight, EPS, **how)

    for found in on_every_rank(2, device, call):
        for got, want in zip(found, expected, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("active", [0, 2, ROWS])
def test_rows_that_are_real_do_not_feel_the_others(active: int, device: torch.device) -> None:
    parts, weight, residual = given(2, torch.bfloat16, device)
    expected = ops.rms_norm_quantize(in_order(parts), weight, EPS, torch.int8, residual=residual)
    for part in parts:
        part[active:] = torch.nan
    n_active = torch.tensor([active], dtype=torch.int32, device=device)

    def call(ranks: Communicator) -> Tensors:
        x = parts[ranks.rank]
        more = {"residual": residual, "n_active": n_active}
        return ops.all_reduce_norm_quantize(x, ranks, weight, EPS, torch.int8, **more)

    for found in on_every_rank(2, device, call):
        for got, want in zip(found, expected, strict=True):
            assert_same_bits(got[:active], want[:active])


def test_rows_of_any_width_and_strides(device: torch.device) -> None:
    for width in (1, 7, 130):
        parts, weight, residual = given(2, torch.bfloat16, device, width)
        wide = [torch.cat([part, part], 1)[:, :width] for part in parts]
        expected = ops.rms_norm(in_order(parts), weight, EPS, residual=residual)

        def call(
            ranks: Communicator,
            wide: list[torch.Tensor] = wide,
            more: Tensors = (weight, residual),
        ) -> Tensors:
            x = wide[ranks.rank]
            return ops.all_reduce_norm(x, ranks, more[0], EPS, residual=more[1])

        for found in on_every_rank(2, device, call):
            for got, want in zip(found, expected, strict=True):
                assert_same_bits(got, want)


def test_opcheck(device: torch.device) -> None:
    """Schemas and fakes, on the tensors that the public ops pass."""
    ranks = ranks_of(1, device)[0]
    [x], weight, residual = given(1, torch.bfloat16, device)
    out, total = torch.zeros_like(x), torch.zeros_like(x)
    codes, scale = torch.zeros_like(x, dtype=torch.int8), torch.zeros(ROWS, device=device)
    fp8, scales = torch.zeros_like(x, dtype=E4M3), torch.zeros(WIDTH // 128, ROWS, device=device)
    norm = (x, ranks.name, weight, EPS, residual)
    calls = {
        "all_reduce": (x, ranks.name, out),
        "all_gather": (x, ranks.name, out),
        "all_reduce_norm": (*norm, out, total),
        "all_reduce_norm_quantize": (*norm, None, None, False, codes, scale, total),
        "all_reduce_norm_quantize_per_group": (*norm, False, fp8, scales, total),
    }
    how = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for name, arguments in calls.items():
        op = getattr(torch.ops.ostinato, name).default
        # Torch's check of mutations adds numbers to e4m3, which torch cannot.
        schema = () if fp8 is arguments[-3] else ("test_schema",)
        torch.library.opcheck(op, arguments, test_utils=(*how, *schema))


def test_autocast_changes_no_bit_and_no_gradient_is_kept(device: torch.device) -> None:
    parts, weight, residual = given(2, torch.float32, device)
    parts = [part.requires_grad_() for part in parts]

    def call(ranks: Communicator) -> Tensors:
        norm = (parts[ranks.rank], ranks, weight, EPS)
        return (ranks.all_reduce(norm[0]), *ops.all_reduce_norm(*norm, residual=residual))

    def cast(ranks: Communicator) -> Tensors:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return call(ranks)

    for with_autocast, without in zip(
        on_every_rank(2, device, cast), on_every_rank(2, device, call), strict=True
    ):
        for got, want in zip(with_autocast, without, strict=True):
            assert not got.requires_grad
            assert_same_bits(got, want)


def test_bad_arguments_are_named() -> None:
    ranks = local_communicators(2)[0]
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight: got shape \[4\], expected \[8\]"):
        ops.all_reduce_norm(x, ranks, weight[:4], EPS)
    with pytest.raises(ValueError, match=r"residual: got shape \[1, 8\], expected \[2, 8\]"):
        ops.all_reduce_norm_quantize(x, ranks, weight, EPS, torch.int8, residual=x[:1])
    with pytest.raises(TypeError, match=r"dtype: got torch.int16, expected torch.int8"):
        ops.all_reduce_norm_quantize(x, ranks, weight, EPS, torch.int16)
    with pytest.raises(ValueError, match=r"eps: got -1\.0"):
        ops.all_reduce_norm_quantize_per_group(x, ranks, weight, -1.0)
    with pytest.raises(TypeError, match=r"n_active: got dtype torch\.int64"):
        ops.all_reduce_norm(x, ranks, weight, EPS, n_active=torch.tensor([1]))
    with pytest.raises(TypeError, match="communicator: got NoneType, expected a Communicator"):
        ops.all_reduce_norm(x, None, weight, EPS)  # type: ignore[arg-type]
