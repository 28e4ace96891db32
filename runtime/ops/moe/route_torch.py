"""Routing by torch's operators: nothing is read back to the host, so that it can be captured."""

from __future__ import annotations

import math

import torch

from .plan import MoePlan

LEAST_SUM = 1e-20  # added to the sum of scores that weights are divided by


def select_experts(
    logits: torch.Tensor,
    scoring: str,
    renormalize: bool,
    routed_scale: float,
    correction_bias: torch.Tensor | None,
    groups: int,
    top_groups: int,
    group_score: str,
    n_active: torch.Tensor | None,
    plan: MoePlan,
) -> None:
    """Write ids and weights of a plan; the arguments are those of `moe_route`, checked."""
    x = logits.float()
    softmax = scoring == "softmax"
    scores = x.softmax(1) if softmax else x.sigmoid()
    compared = x if correction_bias is None else scores + correction_bias
    # Softmax of a row whose largest logit is infinite is NaN throughout.
    valid = ~(compared.isnan() | scores.isnan()).any(1, keepdim=True)
    allowed = torch.ones_like(compared, dtype=torch.bool)
    if groups > 1:
        # Sums are of scores; for the best alone, logits choose alike.
        worth_of = scores if correction_bias is None and group_score == "top2" else compared
        of_groups = worth_of.unflatten(1, (groups, -1))
        best = of_groups.topk(min(2, of_groups.size(2)), dim=2).values
        worth = best.sum(2) if group_score == "top2" else best[:, :, 0]
        kept = _in_order(worth)[:, :top_groups]
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, kept, True)
        allowed = allowed.repeat_interleave(of_groups.size(2), 1)
    # Of experts with a logit of -inf, too, those that are allowed come first.
    order = _in_order(compared.masked_fill(~allowed, -math.inf))
    order = order.gather(1, _in_order(allowed.gather(1, order).float()))
    chosen = order[:, : plan.top_k]
    weights = scores.gather(1, chosen)
    if renormalize:
        total = weights[:, 0]
        for slot in range(1, plan.top_k):  # in this order, as the kernel does
            total = total + weights[:, slot]
        weights = weights / (total + LEAST_SUM).unsqueeze(1)
    weights = weights * routed_scale
    real = torch.ones_like(valid)
    if n_active is not None:
        real = torch.arange(x.size(0), device=x.device).unsqueeze(1) < n_active
    plan.ids.copy_(chosen.masked_fill(~(valid & real), -1))
    plan.weights.copy_(weights.masked_fill(~valid, math.nan).masked_fill(~real, 0.0))


def plan_rows(plan: MoePlan) -> None:
    """Write all else of a plan, whose ids are written."""
    device = plan.ids.device
    ids = plan.ids.flatten()
    expert = ids.masked_fill(ids < 0, plan.experts)
    plan.rows.copy_(expert.sort(stable=True).indices)
    experts = torch.arange(plan.experts, device=device)
    counts = (ids.unsqueeze(1) == experts).sum(0)
    plan.offsets[0] = 0
    plan.offsets[1:] = counts.cumsum(0)
    tiles = -(-counts // plan.tile_tokens)
    ends = tiles.cumsum(0)
    plan.n_tiles.copy_(ends[-1:])
    index = torch.arange(plan.tiles.size(0), device=device)
    of_tile = torch.searchsorted(ends, index, right=True).clamp_(max=plan.experts - 1)
    first = plan.offsets[of_tile] + (index - (ends - tiles)[of_tile]) * plan.tile_tokens
    stop = torch.minimum(first + plan.tile_tokens, plan.offsets[of_tile + 1])
    plan.tiles.copy_(torch.stack([of_tile, first, stop, torch.zeros_like(first)], 1))


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Return the indices of each row of x from its largest element on; of equals the lowest."""
    return x.sort(dim=1, descending=True, stable=True).indices
