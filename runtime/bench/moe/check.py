"""The check of a block's result: the sum over experts of some tokens, in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ...ops.common.e4m3 import to_float32
from ...ops.common.precision import full_precision
from ...ops.linear.quantize_cuda import GROUP
from ..harness.check import Sample, sample_check
from .cases import Case
from .inputs import Inputs

_TOKENS = 8  # that are compared
# Of the error's norm, relative: activations are rounded twice, to 8 bits or 16. The largest product
# of gate and up of a token is some 15 times the usual one, of which INT8 leaves 8 steps.
_MAX_ERROR = {torch.int8: 0.05, torch.float8_e4m3fn: 0.08, torch.bfloat16: 0.015}


def expected(inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
    """Return what the block makes of these tokens, [tokens, H] fp32."""
    full_precision(inputs.x.device)
    x = inputs.x[tokens].float()
    logits = x @ inputs.weights.router.float().t()
    weights = logits.gather(1, inputs.ids[tokens]).softmax(1)
    rows = []
    for token, ids in enumerate(inputs.ids[tokens]):
        total = torch.zeros_like(x[token])
        for slot, expert in enumerate(ids.tolist()):
            w = inputs.weights
            gate, up = (_weight(w.gate_up, w.gate_up_scale, expert) @ x[token]).chunk(2)
            y = _weight(w.down, w.down_scale, expert) @ (functional.silu(gate) * up)
            total += weights[token, slot] * y
        rows.append(total)
    return torch.stack(rows)


def _weight(stored: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
    """Return the weight [rows, columns] of an expert in fp32."""
    plain = to_float32(stored[expert])
    if scale is None:
        return plain
    own = scale[expert]
    if own.dim() == 1:
        return plain * own.unsqueeze(1)
    wide = own.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return plain * wide[: plain.size(0), : plain.size(1)]


def _samples(case: Case, inputs: Inputs) -> Sequence[Sample]:
    step = max(1, case.m // _TOKENS)
    tokens = torch.arange(0, case.m, step, device=inputs.x.device)[:_TOKENS]
    return [Sample("a token", tokens, expected(inputs, tokens))]


CHECK = sample_check(
    _samples,
    lambda inputs: inputs.out.shape,
    lambda inputs: _MAX_ERROR[inputs.weights.gate_up.dtype],
)
