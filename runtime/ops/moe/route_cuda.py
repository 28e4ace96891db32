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
from ..common.device import KERNEL_NAMES, address_of, current_stream, on_device
from ..common.sizes import ceil_div
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
    plan: MoePlan,
) -> None:
    """Launch routing on torch's current stream; the arguments are those of `moe_route`, checked."""
    device = logits.get_device()
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
        )
