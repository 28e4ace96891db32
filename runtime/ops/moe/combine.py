"""The sum over the experts of each token, with all that stands between it and the next product."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.sizes import ceil_div
from ..common.torch_library import register
from ..linear.block_scales import empty_scales
from ..linear.norms import normalize_and_quantize, normalize_into
from ..linear.quantize_cuda import GROUP
from ..linear.quantize_groups import norm_quantize_per_group
from .combine_cuda import MoeCombine, combine
from .plan import MoePlan, check_plan


class Combined(NamedTuple):
    """What `moe_combine` returns; None where it was not asked for.

    Args:
        total: [T, H], the sum of experts, shared expert and residual.
        normed: [T, H], its RMS norm: of total's dtype, or 8-bit codes with `quantize`.
        scale: fp32, of the codes: [T], or [ceil(H / 128), T] with `per_group`.
    """

    total: torch.Tensor
    normed: torch.Tensor | None
    scale: torch.Tensor | None


def moe_combine(
    y: torch.Tensor,
    plan: MoePlan,
    *,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    quantize: torch.dtype | None = None,
    per_group: bool = False,
    power_of_two: bool = False,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> Combined:
    """Add up the outputs of each token's experts, times their weights, in the order of its slots.

    total[t] = Σ over slots j: plan.weights[t, j] · y[t, j] + sigmoid(shared_gate[t]) · shared[t] +
    residual[t], in fp32 in this order, rounded once. Slots without an expert add nothing, unless
    their weight is NaN, which makes the token's results NaN. With `norm_weight`, the rounded total
    is then normalised as by `rms_norm`, and with `quantize` quantised as by `rms_norm_quantize` or,
    with `per_group`, `rms_norm_quantize_per_group`.

    On a GPU, from sm_80 on, this is one launch, and another with `norm_weight`.

    Args:
        y: [T, top_k, H] bf16, fp16 or fp32, as `moe_linear(to="slots")` makes it.
        plan: of `moe_route`.
        shared: [T, H] of y's dtype, the output of an expert that all tokens go to.
        shared_gate: [T] or [T, 1] of y's dtype or fp32, logits of the weight of `shared`, which is
            1 without it.
        residual: [T, H] of y's dtype; without `norm_weight`, too.
        norm_weight: [H] of y's dtype or fp32, a constant: on CUDA it may be read while kernels
            before this one are still running.
        eps: added to the mean of squares, at least 0.
        quantize: None, torch.int8 or torch.float8_e4m3fn, with `norm_weight` only.
        per_group: scales of groups of 128 of H, e4m3 only.
        power_of_two: with `per_group`, round scales up to powers of two.
        out: [T, H] of y's dtype, the total; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is launched.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.tensor("y", y, checks.FLOAT_DTYPES, ("T", "top_k", "H"))
    checks.not_empty("y", y, "H")
    device = y.device
    check_plan(plan, device)
    shape = (plan.tokens, y.size(2))
    checks.tensor("y", y, (y.dtype,), (plan.tokens, plan.top_k, "H"), device)
    for name, value in (("shared", shared), ("residual", residual)):
        if value is not None:
            checks.tensor(name, value, (y.dtype,), shape, device)
    gate = _check_gate(shared_gate, shared, y, plan.tokens)
    _check_quantize(norm_weight, eps, quantize, per_group, power_of_two, y)
    if out is not None:
        checks.output("out", out, (y.dtype,), shape, device)
    with checks.launch_stream(stream, device):
        total = torch.empty(shape, dtype=y.dtype, device=device) if out is None else out
        normed = scale = None
        if norm_weight is not None:
            normed = torch.empty(shape, dtype=quantize or y.dtype, device=device)
        if per_group:
            scale = empty_scales(ceil_div(shape[1], GROUP), shape[0], device)
        elif quantize is not None:
            scale = torch.empty(shape[0], dtype=torch.float32, device=device)
        routing = (plan.ids, plan.weights)
        rest = (shared, gate, residual, norm_weight, eps, power_of_two)
        _op(y, *routing, *rest, total, normed, scale)
    return Combined(total, normed, scale)


def _check_gate(
    shared_gate: torch.Tensor | None, shared: torch.Tensor | None, y: torch.Tensor, tokens: int
) -> torch.Tensor | None:
    """Check the gate of the shared expert, and return it as a vector."""
    if shared_gate is None:
        return None
    if shared is None:
        raise ValueError("shared_gate: got a tensor, expected None without shared")
    dtypes = tuple(dict.fromkeys((y.dtype, torch.float32)))
    if getattr(shared_gate, "ndim", 1) == 2:
        checks.tensor("shared_gate", shared_gate, dtypes, (tokens, 1), y.device)
        return shared_gate[:, 0]
    checks.tensor("shared_gate", shared_gate, dtypes, (tokens,), y.device)
    return shared_gate


def _check_quantize(
    norm_weight: torch.Tensor | None,
    eps: float,
    quantize: torch.dtype | None,
    per_group: bool,
    power_of_two: bool,
    y: torch.Tensor,
) -> None:
    checks.number("eps", eps, least=0.0)
    for name, flag in (("per_group", per_group), ("power_of_two", power_of_two)):
        checks.flag(name, flag)
    if norm_weight is not None:
        dtypes = tuple(dict.fromkeys((y.dtype, torch.float32)))
        checks.tensor("norm_weight", norm_weight, dtypes, (y.size(2),), y.device)
    if quantize is not None:
        checks.option("quantize", quantize, checks.QUANTIZED_DTYPES)
        if norm_weight is None:
            raise ValueError(f"quantize: got {quantize}, expected None without norm_weight")
    if per_group and quantize is not torch.float8_e4m3fn:
        raise ValueError(
            f"per_group: got True with quantize = {quantize}, expected torch.float8_e4m3fn"
        )
    if power_of_two and not per_group:
        raise ValueError("power_of_two: got True, expected False without per_group")


def _moe_combine(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    power_of_two: bool,
    total: torch.Tensor,
    normed: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> None:
    if total.numel() == 0:
        return
    if has_kernel(MoeCombine, y):
        combine(y, ids, weights, shared, shared_gate, residual, total)
    else:
        _add(y, ids, weights, shared, shared_gate, residual, total)
    if normed is None or norm_weight is None:
        return
    norm = ("rms_norm", total, norm_weight, None, eps, None)
    if scale is None:
        normalize_into(*norm, normed, None)
    elif scale.dim() == 2:
        norm_quantize_per_group(*norm, power_of_two, normed, scale, None)
    else:
        normalize_and_quantize(*norm, None, None, False, normed, scale, None)


def _add(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    total: torch.Tensor,
) -> None:
    """Write the sum by torch's operators."""
    acc = torch.zeros(total.shape, dtype=torch.float32, device=y.device)
    for slot in range(y.size(1)):
        # What a slot without an expert holds was never written, and may be NaN.
        of_slot = y[:, slot].float().masked_fill(ids[:, slot : slot + 1] < 0, 0.0)
        acc += weights[:, slot : slot + 1] * of_slot
    if shared is not None:
        gate = 1.0 if shared_gate is None else shared_gate.float().sigmoid().unsqueeze(1)
        acc += gate * shared.float()
    if residual is not None:
        acc += residual.float()
    total.copy_(acc)


_op = register(
    "moe_combine(Tensor y, Tensor ids, Tensor weights, Tensor? shared, Tensor? shared_gate, "
    "Tensor? residual, Tensor? norm_weight, float eps, bool power_of_two, Tensor(a!) total, "
    "Tensor(b!)? normed, Tensor(c!)? scale) -> ()",
    _moe_combine,
)
