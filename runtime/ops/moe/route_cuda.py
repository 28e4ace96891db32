"""Routing on CUDA: from tensors to a launch of csrc/moe_route."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.variant import FLOAT_DTYPES, OneDtypeVariant
from ..common import pdl
from ..common.device import KERNEL_NAMES, address_of, current_stream, gpu, has_kernel, on_device
from ..common.sizes import ceil_div
from ..linear.packed_weight import TILE_CHANNELS
from .moe_linear_cuda import FEW_CHANNELS, PREFETCH_TILE, MoeLinear
from .plan import MoePlan


@dataclass(frozen=True, kw_only=True)
class MoeRoute(OneDtypeVariant):
    """The kernel; `dtype` is that of the logits."""

    family: ClassVar[str] = "moe_route"
    source: ClassVar[Path] = CSRC / "moe_route" / "moe_route.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


# csrc/moe_route: tokens that one CTA routes, and that one has of more; how many a cluster may have;
# CTAs that read what all of them have counted; tokens whose counts fit into 16 bits.
_FEW_TOKENS = 32
_SEGMENT_TOKENS = 16
_CLUSTERS = (4, 8)
_MOST_SEGMENTS = 256
_MOST_SEGMENT_TOKENS = 65535

# The L2 fetches weights while a launch routes: of at most so many tokens, and so much, half of
# the L2: what memory reads meanwhile, and more.
_FETCH_TOKENS = _CLUSTERS[-1] * _SEGMENT_TOKENS
FETCH_BYTES = 24 << 20
FETCH_CTAS = 64  # that ask for it
# Of all experts before they are chosen, too, from so many slots of one on: then exp(-2) of them are
# fetched for nothing, if tokens choose at random.
FETCH_SLOTS = 2

register_family(MoeRoute, [MoeRoute(dtype=dtype) for dtype in FLOAT_DTYPES])


def segments_of(tokens: int) -> int:
    """Return how many CTAs route so many tokens."""
    if tokens <= _FEW_TOKENS:
        return 1
    for cluster in _CLUSTERS:
        if tokens <= cluster * _SEGMENT_TOKENS:
            return cluster
    most = max(_MOST_SEGMENTS, ceil_div(tokens, _MOST_SEGMENT_TOKENS))
    size = ceil_div(tokens, min(ceil_div(tokens, _SEGMENT_TOKENS), most))
    return ceil_div(tokens, size)


def fetch_of(next_w: torch.Tensor | None, plan: MoePlan, sms: int) -> dict[str, int]:
    """Return the arguments by which a launch has the L2 fetch the beginning of what comes next.

    That is the beginning of the tiles of channels by which the CTAs of the next product begin.

    Args:
        next_w: the data of the next product's `PackedExperts`.
        plan: what routing writes.
        sms: multiprocessors of the GPU.
    """
    few = plan.tokens <= _FETCH_TOKENS and plan.tile_tokens <= PREFETCH_TILE
    least = ceil_div(FETCH_SLOTS * plan.experts, plan.top_k)
    knows_chosen = plan.tokens <= _FEW_TOKENS  # one CTA routes, and others can do the same
    if next_w is None or not few or not (knows_chosen or plan.tokens >= least) or not FETCH_BYTES:
        return {}
    return {
        "next_w": next_w.data_ptr(),
        "fetch_ctas": FETCH_CTAS,
        "next_ctas": sms,
        "next_expert_tiles": next_w.size(0) // plan.experts,
        "next_tile_bytes": next_w[0].nbytes,
        "next_cta_tiles": FEW_CHANNELS // TILE_CHANNELS,
        "next_budget": FETCH_BYTES,
        "next_least_tokens": least,
    }


def route(
    logits: torch.Tensor,
    scoring: str,
    renormalize: bool,
    routed_scale: float,
    correction_bias: torch.Tensor | None,
    groups: int,
    top_groups: int,
    group_score: str,
    n_active: torch.Tensor | None,
    next_w: torch.Tensor | None,
    plan: MoePlan,
) -> None:
    """Launch routing on torch's current stream; the arguments are those of `moe_route`, checked."""
    device = logits.get_device()
    if next_w is not None and not has_kernel(MoeLinear, next_w):
        next_w = None
    with on_device(device):
        stream = current_stream(device)
        kernel = MoeRoute(dtype=KERNEL_NAMES[logits.dtype])
        segments, counts = segments_of(plan.tokens), None
        if segments > 1:
            shape = (segments, 2 * ceil_div(plan.experts, 2))
            counts = torch.empty(shape, dtype=torch.int16, device=logits.device)
        load(kernel, device=device, stream=stream).launch(
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            correction_bias=address_of(correction_bias),
            n_active=address_of(n_active),
            ids=plan.ids.data_ptr(),
            weights=plan.weights.data_ptr(),
            rows=plan.rows.data_ptr(),
            offsets=plan.offsets.data_ptr(),
            tiles=plan.tiles.data_ptr(),
            n_tiles=plan.n_tiles.data_ptr(),
            segments=segments,
            counts=address_of(counts),
            tokens=plan.tokens,
            experts=plan.experts,
            top_k=plan.top_k,
            tile_tokens=plan.tile_tokens,
            sigmoid=scoring == "sigmoid",
            renormalize=renormalize,
            routed_scale=routed_scale,
            groups=groups,
            top_groups=top_groups,
            top2=group_score == "top2",
            pdl=pdl.enabled(),
            stream=stream,
            **fetch_of(next_w, plan, gpu(device)[1]),
        )
