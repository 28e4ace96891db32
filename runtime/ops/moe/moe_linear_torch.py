"""Products of the rows of each expert by torch's operators, where there is no kernel."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from ..common.e4m3 import as_bytes
from ..common.precision import full_precision
from ..common.sizes import ceil_div
from ..linear import cpu_product
from ..linear.block_linear import dequantized
from ..linear.block_scales import scale_channels
from .packed_experts import unpack, unpack_one

_GATHERED = 1 << 24  # elements of weights that a GPU gathers at once


def multiply_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    channels: int,
    to_experts: bool,
    gated: bool,
    ids: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Do `moe_linear` with checked arguments; w is plain or the data of `PackedExperts`."""
    top_k = ids.size(1)
    out = out if to_experts else out.flatten(0, 1)
    if x.device.type != "cpu":
        if w.dim() == 4:
            w = unpack(w, offsets.size(0) - 1, channels, x.size(1), gated)
        multiply_slot_by_slot(
            x, w, x_scale, w_scale, to_experts, gated, ids.flatten(), rows, top_k, out
        )
        return
    for expert, (first, stop) in enumerate(pairwise(offsets.tolist())):
        if first == stop:
            continue
        slots = rows[first:stop].long()
        of_x = slots // top_k if to_experts else torch.arange(first, stop, device=x.device)
        weight = (
            w[expert]
            if w.dim() == 3
            else unpack_one(w, offsets.size(0) - 1, expert, channels, x.size(1), gated)
        )
        of_expert = None if w_scale is None else w_scale[expert]
        x_rows = as_bytes(x)[of_x].view(x.dtype)
        y = _product(x_rows, weight, _scales_of(x_scale, of_x), of_expert)
        y = _silu_mul(y) if gated else y
        if to_experts:
            out[first:stop] = y
        else:
            out[slots] = y.to(out.dtype)


def _scales_of(x_scale: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    return None if x_scale is None else x_scale[..., rows]


def _product(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return x [rows, K] times w [N, K], scaled, in fp32, on the CPU."""
    if x_scale is None or w_scale is None:
        y = torch.empty(x.size(0), w.size(0), dtype=torch.float32, device=x.device)
        cpu_product.float_product(x, w, None, y)
        return y
    if w_scale.dim() == 2:
        shared = scale_channels(w_scale, w.size(0))
        of_channels = w_scale.t().repeat_interleave(shared, 0)[: w.size(0)]
        wide = (dequantized(x, x_scale.t()), dequantized(w, of_channels))
        y = torch.empty(x.size(0), w.size(0), dtype=torch.float32, device=x.device)
        cpu_product.float_product(*wide, None, y)
        return y
    if x.dtype is torch.int8:
        y = cpu_product.int8_product(x, w).float()
    else:
        y = torch.empty(x.size(0), w.size(0), dtype=torch.float32, device=x.device)
        cpu_product.float_product(x, w, None, y)
    return y.mul_(w_scale).mul_(x_scale.unsqueeze(1))


def multiply_slot_by_slot(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    to_experts: bool,
    gated: bool,
    ids: torch.Tensor,
    rows: torch.Tensor,
    top_k: int,
    out: torch.Tensor,
) -> None:
    """Multiply every row by a copy of its expert's weight, so that the host need not know which.

    A fixed number of rows at a time, so that a row's bits depend on no other.
    """
    full_precision(x.device)
    # Sums of int8 products are exact in fp64, not in fp32.
    wide = torch.float64 if x.dtype is torch.int8 else torch.float32
    size = max(1, _GATHERED // max(1, w.size(1) * w.size(2)))
    count = rows.size(0)
    padded = functional.pad(rows.long(), (0, ceil_div(count, size) * size - count))
    for first in range(0, count, size):
        at = torch.arange(first, first + size, device=x.device).clamp_(max=count - 1)
        slots = padded[first : first + size]
        expert = ids[slots]
        valid = (expert >= 0).unsqueeze(1)
        expert = expert.clamp(min=0)
        of_x = slots // top_k if to_experts else at
        operand = as_bytes(x)[of_x].view(x.dtype).to(wide)
        weight = as_bytes(w)[expert].view(w.dtype).to(wide)
        scales = _scales_of(x_scale, of_x)
        if w_scale is not None and scales is not None and w_scale.dim() == 3:
            k = x.size(1)
            operand *= scales.t().repeat_interleave(128, 1)[:, :k]
            of_w = w_scale[expert].repeat_interleave(128, 1)[:, :k]
            shared = scale_channels(w_scale[0], w.size(1))
            weight *= of_w.repeat_interleave(shared, 2)[:, :, : w.size(1)].mT
        y = torch.bmm(weight, operand.unsqueeze(2)).squeeze(2).float()
        if w_scale is not None and scales is not None and w_scale.dim() == 2:
            y = y.mul_(w_scale[expert]).mul_(scales.unsqueeze(1))
        y = (_silu_mul(y) if gated else y).to(out.dtype)
        kept = min(size, count - first)
        where = (at if to_experts else slots)[:kept]
        out[where] = torch.where(valid[:kept], y[:kept], out[where])


def _silu_mul(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=1)
    return gate / (1 + torch.exp(-gate)) * up
