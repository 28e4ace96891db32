"""Implementations of blocks of experts: ours, and a chain of torch's grouped products."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ... import ops
from ...models.norms import summed
from ..harness.benchmark import Implementation, each
from ..harness.summary import OURS
from .cases import Case
from .inputs import Inputs


def ours(precision: str) -> Implementation[Case, Inputs]:
    """Return our block with weights of a precision, as `random_decoder` calls it."""
    name = f"{OURS}{precision.replace('-', '_')}"
    return Implementation(name, precision, each(_ours))


def _ours(s: Inputs) -> torch.Tensor:
    return summed(s.weights.mixture(s.x, s.config))


def _plan(s: Inputs) -> ops.MoePlan:
    logits = ops.linear(s.x, s.weights.router, out_dtype=torch.float32)
    return ops.moe_route(logits, s.config.top_k, renormalize=True)


def _grouped_bf16(s: Inputs) -> torch.Tensor:
    """Multiply by torch's grouped products (CUTLASS), between our routing and our sum."""
    plan, w = _plan(s), s.weights
    rows = s.x[plan.rows // s.config.top_k]
    ends = plan.offsets[1:]
    gate_up = torch._grouped_mm(rows, w.gate_up.transpose(1, 2), ends)
    inner = ops.activation(gate_up, "silu_mul")
    y = torch._grouped_mm(inner, w.down.transpose(1, 2), ends)
    return _combined(s, plan, y)


def _grouped_fp8(s: Inputs) -> torch.Tensor:
    """Do likewise in FP8 with a scale per row, quantised by our kernels."""
    plan, w = _plan(s), s.weights
    assert w.gate_up_scale is not None
    assert w.down_scale is not None
    codes, scale = ops.quantize_per_token(s.x, torch.float8_e4m3fn)
    tokens = plan.rows // s.config.top_k
    rows = codes.view(torch.int8)[tokens].view(codes.dtype)
    ends = plan.offsets[1:]
    bf16 = torch.bfloat16
    gate_up = torch._scaled_grouped_mm(
        *(rows, w.gate_up.transpose(1, 2), scale[tokens], w.gate_up_scale),
        offs=ends,
        out_dtype=bf16,
        use_fast_accum=True,
    )
    inner, of_inner = ops.activation_quantize(gate_up, "silu_mul", codes.dtype)
    y = torch._scaled_grouped_mm(
        *(inner, w.down.transpose(1, 2), of_inner, w.down_scale),
        offs=ends,
        out_dtype=bf16,
        use_fast_accum=True,
    )
    return _combined(s, plan, y)


def _combined(s: Inputs, plan: ops.MoePlan, y: torch.Tensor) -> torch.Tensor:
    """Return the sum over slots of rows that are sorted by expert."""
    slots = torch.empty_like(y)
    slots[plan.rows.long()] = y
    return ops.moe_combine(slots.view(-1, s.config.top_k, y.size(1)), plan).total


# In the order in which they are timed: torch's operators, and the adapters of others.
PEERS: Mapping[str, Implementation[Case, Inputs] | str] = {
    "vllm_i8": "vllm_moe.py",
    "vllm_f8": "vllm_moe.py",
    "vllm_f8t": "vllm_moe.py",
    "vllm_blk": "vllm_moe.py",
    "vllm_dg": "vllm_moe.py",
    "vllm_bf16": "vllm_moe.py",
    "grp_f8": Implementation("grp_f8", "fp8", each(_grouped_fp8)),
    "grp_bf16": Implementation("grp_bf16", "bf16", each(_grouped_bf16)),
}
# What ours is compared with: peers whose activations and weights are stored alike.
RIVALS = {
    f"{OURS}int8": ("vllm_i8", "vllm_f8", "vllm_f8t", "grp_f8"),
    f"{OURS}fp8": ("vllm_f8", "vllm_f8t", "grp_f8"),
    f"{OURS}fp8_block": ("vllm_blk", "vllm_dg"),
    f"{OURS}bf16": ("vllm_bf16", "grp_bf16"),
}
