"""Inputs of a mixture of experts, shared by its tests."""

from __future__ import annotations

from typing import Any

import torch
from ops_cases import E4M3, quantized_randn

from ostinato import ops
from ostinato.ops.moe.plan import MoePlan

# "block" and "block128": scales of 8 and of 128 channels.
FORMATS = ("int8", "e4m3", "block", "block128", "bf16", "fp16")


def poisoned(plan: MoePlan) -> MoePlan:
    """Return the plan with nonsense where its fields are undefined."""
    tiles = plan.tiles.clone()
    tiles[int(plan.n_tiles) :] = 2**30
    return plan._replace(tiles=tiles)


def whole_blocks(form: str, n: int, *, gated: bool) -> int:
    """Return n or, where the halves of a gated weight must be whole blocks, enough for those."""
    return -(-n // 256) * 256 if gated and form == "block128" else n


def operands(
    form: str, rows: int, experts: int, n: int, k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return x [rows, k], w [experts, n, k] and their scales in a weight format."""
    if form in ("bf16", "fp16"):
        dtype = torch.bfloat16 if form == "bf16" else torch.float16
        x, w = torch.randn(rows, k), torch.randn(experts, n, k) / k**0.5
        return x.to(device, dtype), w.to(device, dtype), {}
    dtype = torch.int8 if form == "int8" else E4M3
    x, w = quantized_randn((rows, k), dtype), quantized_randn((experts * n, k), dtype)
    shapes = ((rows,), (experts, n))
    if form in ("block", "block128"):
        shared = 8 if form == "block" else 128
        shapes = ((-(-k // 128), rows), (experts, -(-k // 128), -(-n // shared)))
    # So that silu sees numbers of its middle.
    x_scale, w_scale = ((torch.rand(shape) + 0.5) / 100 for shape in shapes)
    scales = {"x_scale": x_scale.to(device), "w_scale": w_scale.to(device)}
    return x.to(device), w.view(experts, n, k).to(device), scales


def routing(
    tokens: int, experts: int, top_k: int, device: torch.device, *, kind: str = "random"
) -> MoePlan:
    """Return a plan: "random", "skewed" to few experts, or "one", all tokens to the same."""
    logits = torch.randn(tokens, experts)
    if kind == "skewed":
        logits += 4 * torch.arange(experts).remainder(7).eq(3)
    if kind == "one":
        logits += 50 * torch.arange(experts).lt(top_k)
    return poisoned(ops.moe_route(logits.to(device), top_k, renormalize=True))
