"""The readable twins of the ops of a mixture of experts; see `ostinato.ops.reference`."""

from __future__ import annotations

import math

import torch

from ..linear.reference_rows import (
    quantize_per_group,
    quantize_per_token,
    rms_norm,
    silu_mul,
)
from .plan import MoePlan, empty_plan

_GROUP = 128
_SCALE_CHANNELS = 8


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    routed_scale: float = 1.0,
    correction_bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    n_active: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> MoePlan:
    """Choose for one token after another, then list the rows of one expert after another."""
    tokens, experts = logits.shape
    plan = empty_plan(tokens, top_k, experts, logits.device)
    real = tokens if n_active is None else int(n_active)
    for token in range(tokens):
        plan.ids[token], plan.weights[token] = -1, 0.0
        if token >= real:
            continue
        x = logits[token].to(dtype)
        scores = x.softmax(0) if scoring == "softmax" else x.sigmoid()
        compared = x if correction_bias is None else scores + correction_bias.to(dtype)
        if scores.isnan().any() or compared.isnan().any():
            plan.weights[token] = math.nan
            continue
        worth_of = scores if correction_bias is None and group_score == "top2" else compared
        kept = _best_groups(worth_of.tolist(), groups, top_groups, group_score)
        size = experts // groups
        candidates = [e for e in range(experts) if e // size in kept]
        chosen = sorted(candidates, key=lambda e: (-float(compared[e]), e))[:top_k]
        weights = scores[chosen]
        if renormalize:
            weights = weights / (weights.sum() + 1e-20)
        plan.ids[token] = torch.tensor(chosen, dtype=torch.int32)
        plan.weights[token] = weights * routed_scale
    _list_rows(plan)
    return plan


def _best_groups(scores: list[float], groups: int, top_groups: int, group_score: str) -> set[int]:
    size, best = len(scores) // groups, 2 if group_score == "top2" else 1
    worth = [
        sum(sorted(scores[g * size : (g + 1) * size], reverse=True)[:best]) for g in range(groups)
    ]
    return set(sorted(range(groups), key=lambda g: (-worth[g], g))[:top_groups])


def _list_rows(plan: MoePlan) -> None:
    ids = plan.ids.flatten().tolist()
    rows: list[int] = []
    tiles: list[tuple[int, int, int, int]] = []
    plan.offsets[0] = 0
    for expert in range(plan.experts):
        first = len(rows)
        rows += [slot for slot, of_slot in enumerate(ids) if of_slot == expert]
        plan.offsets[expert + 1] = len(rows)
        for start in range(first, len(rows), plan.tile_tokens):
            tiles.append((expert, start, min(start + plan.tile_tokens, len(rows)), 0))
    rows += [slot for slot, of_slot in enumerate(ids) if of_slot < 0]
    plan.rows.copy_(torch.tensor(rows, dtype=torch.int32))
    plan.n_tiles.fill_(len(tiles))
    if tiles:
        plan.tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)


def moe_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    plan: MoePlan,
    *,
    to: str,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    activation: str | None = None,
    power_of_two: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multiply one row after another by its expert's weight; what has no expert is zero."""
    if w.itemsize == 1 and x.itemsize > 1 and w_scale is not None:
        if w_scale.dim() == 3:
            x, x_scale = quantize_per_group(x, power_of_two=power_of_two)
        else:
            x, x_scale = quantize_per_token(x, w.dtype)
    width = w.size(1) if activation is None else w.size(1) // 2
    out = torch.zeros(plan.tokens * plan.top_k, width, dtype=dtype, device=x.device)
    ids = plan.ids.flatten().tolist()
    for row, slot in enumerate(plan.rows[: int(plan.n_rows)].tolist()):
        at, expert = slot // plan.top_k if to == "experts" else row, ids[slot]
        weight, operand = w[expert].to(dtype), x[at].to(dtype)
        if w_scale is not None and x_scale is not None and w_scale.dim() == 3:
            of_k = torch.arange(x.size(1)) // _GROUP
            few = w_scale.size(2) == -(-w.size(1) // _SCALE_CHANNELS)
            of_n = torch.arange(w.size(1)) // (_SCALE_CHANNELS if few else _GROUP)
            weight = weight * w_scale[expert].to(dtype)[of_k][:, of_n].t()
            operand = operand * x_scale[of_k, at].to(dtype)
        if x.dtype is torch.int8:
            # fp64 holds every sum of fewer than 2^37 products of two int8 numbers.
            y = (w[expert].double() @ x[at].double()).to(dtype)
        else:
            y = weight @ operand
        if w_scale is not None and x_scale is not None and w_scale.dim() == 2:
            y = y * w_scale[expert].to(dtype) * x_scale[at].to(dtype)
        if activation is not None:
            y = silu_mul(y.unsqueeze(0), dtype=dtype)[0]
        out[row if to == "experts" else slot] = y
    return out if to == "experts" else out.view(plan.tokens, plan.top_k, width)


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
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Add up slot after slot; return (total, norm of it rounded, scale)."""
    total = torch.zeros(y.size(0), y.size(2), dtype=dtype, device=y.device)
    for token in range(y.size(0)):
        for slot in range(y.size(1)):
            weight = plan.weights[token, slot].to(dtype)
            if plan.ids[token, slot] >= 0:
                total[token] += weight * y[token, slot].to(dtype)
            elif weight.isnan():
                total[token] = math.nan
        if shared is not None:
            gate = 1.0 if shared_gate is None else shared_gate.view(-1)[token].to(dtype).sigmoid()
            total[token] += gate * shared[token].to(dtype)
        if residual is not None:
            total[token] += residual[token].to(dtype)
    if norm_weight is None:
        return total, None, None
    normed = rms_norm(total.to(y.dtype), norm_weight, eps, dtype=dtype)
    if quantize is None:
        return total, normed, None
    if per_group:
        return total, *quantize_per_group(normed, power_of_two=power_of_two)
    return total, *quantize_per_token(normed, quantize)
