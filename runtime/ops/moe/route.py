"""Routing: which experts a token goes to, with what weights, and which rows an expert gets."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.torch_library import register
from .plan import MoePlan, empty_plan
from .route_cuda import MoeRoute, route
from .route_torch import plan_rows, select_experts

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")
MOST_EXPERTS = 512
MOST_GROUPS = 32
MOST_TOP_K = 32


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
    stream: checks.Stream = None,
) -> MoePlan:
    """Choose the experts of each token, and sort the tokens by expert.

    The score of an expert is the softmax of the token's logits over all experts, or the sigmoid of
    its own. The `top_k` experts with the highest score, to which `correction_bias` is added for
    this comparison alone, are chosen; of equal ones that with the lowest id. Where a comparison of
    logits chooses the same in exact arithmetic, as without a bias, logits are compared. With
    `groups`, adjacent experts form groups of equal size, of which the `top_groups` best are kept
    first.

    An expert's weight is its score, divided by the sum of the chosen scores + 1e-20 with
    `renormalize` (softmax over the chosen logits alone is softmax with `renormalize`), times
    `routed_scale`.

    A token whose logits do not allow a choice (one is NaN or, with softmax, the largest is
    infinite) has no expert, and weights of NaN: its result is NaN, and no other token's. (Mixtral,
    arXiv 2401.04088; DeepSeek-V3, arXiv 2412.19437.)

    Args:
        logits: [T, experts] bf16, fp16 or fp32, with at most 512 experts; a bias of the router
            belongs to the product that made them. T·top_k must be below 2³¹.
        top_k: experts of a token, 1 to 32, and at most as many as the kept groups have.
        scoring: "softmax" or "sigmoid".
        renormalize: make the weights of a token add up to `routed_scale`.
        routed_scale: what all weights are multiplied by.
        correction_bias: [experts] fp32, added to scores for the choice.
        groups: how many groups the experts are in; a divisor of their number, at most 32.
        top_groups: how many groups are kept, 1 to `groups`; with one group, 1.
        group_score: "max", the best expert of a group, or "top2", the sum of its two best.
        n_active: int32 [1], how many tokens are real: those after them are padding, which goes to
            no expert. On CUDA it is read early, as by `linear`.
        stream: see `ostinato.ops`.

    Returns:
        The plan that `moe_linear` and `moe_combine` take; its tensors are of fixed size.

    Raises:
        TypeError, ValueError: naming the argument, before anything is launched.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.tensor("logits", logits, checks.FLOAT_DTYPES, ("T", "experts"))
    checks.not_empty("logits", logits, "experts")
    tokens, experts = logits.shape
    if experts > MOST_EXPERTS:
        raise ValueError(f"logits: got {experts} experts, expected at most {MOST_EXPERTS}")
    _check_choice(experts, top_k, groups, top_groups)
    checks.int32_sizes("logits", (tokens * top_k,), "T·top_k")
    for name, value, allowed in (
        ("scoring", scoring, SCORINGS),
        ("group_score", group_score, GROUP_SCORES),
    ):
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}, expected {' or '.join(map(repr, allowed))}")
    checks.flag("renormalize", renormalize)
    checks.number("routed_scale", routed_scale)
    if correction_bias is not None:
        bias = (torch.float32,)
        checks.tensor("correction_bias", correction_bias, bias, (experts,), logits.device)
    checks.active(n_active, logits.device)
    with checks.launch_stream(stream, logits.device):
        plan = empty_plan(tokens, top_k, experts, logits.device)
        _op(
            logits,
            scoring,
            renormalize,
            routed_scale,
            correction_bias,
            groups,
            top_groups,
            group_score,
            n_active,
            *plan,
        )
    return plan


def _check_choice(experts: int, top_k: int, groups: int, top_groups: int) -> None:
    checks.integer("groups", groups, least=1)
    checks.integer("top_groups", top_groups, least=1)
    if experts % groups:
        raise ValueError(f"groups: got {groups}, expected a divisor of {experts} experts")
    if groups > MOST_GROUPS:
        raise ValueError(f"groups: got {groups}, expected at most {MOST_GROUPS}")
    if top_groups > groups:
        raise ValueError(f"top_groups: got {top_groups}, expected at most {groups} groups")
    checks.integer("top_k", top_k, least=1)
    candidates = min(experts // groups * top_groups, MOST_TOP_K)
    if top_k > candidates:
        raise ValueError(
            f"top_k: got {top_k}, expected at most {candidates} of {experts} experts "
            f"({top_groups} of {groups} groups, at most {MOST_TOP_K})"
        )


def _moe_route(
    logits: torch.Tensor,
    scoring: str,
    renormalize: bool,
    routed_scale: float,
    correction_bias: torch.Tensor | None,
    groups: int,
    top_groups: int,
    group_score: str,
    n_active: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    n_tiles: torch.Tensor,
    tile_tokens: int,
) -> None:
    plan = MoePlan(ids, weights, rows, offsets, tiles, n_tiles, tile_tokens)
    options = (scoring, renormalize, routed_scale, correction_bias)
    of_groups = (groups, top_groups, group_score)
    if has_kernel(MoeRoute, logits):
        route(logits, *options, *of_groups, n_active, plan)
        return
    select_experts(logits, *options, *of_groups, n_active, plan)
    plan_rows(plan)


_op = register(
    "moe_route(Tensor logits, str scoring, bool renormalize, float routed_scale, "
    "Tensor? correction_bias, int groups, int top_groups, str group_score, Tensor? n_active, "
    "Tensor(a!) ids, Tensor(b!) weights, Tensor(c!) rows, Tensor(d!) offsets, Tensor(e!) tiles, "
    "Tensor(f!) n_tiles, int tile_tokens) -> ()",
    _moe_route,
)
