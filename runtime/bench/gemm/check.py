"""The check of a product, element by element."""

from __future__ import annotations

import math

import torch

from ...ops.common.e4m3 import to_float32
from ...ops.common.precision import full_precision
from ...ops.linear.block_linear import dequantized
from ...ops.linear.quantize_cuda import GROUP
from ..harness.check import Check
from .cases import Case
from .inputs import Inputs, Layout

_BF16_ROUNDING = 2.0**-8
# Of the accumulators, relative: fp32 sums of exact products, and what cuBLAS does to bf16.
_SUM_ERROR = {torch.int8: 1e-3, torch.bfloat16: 2.0**-6}
# Fast accumulation keeps about 13 fraction bits of the sum, after every 32 products. With block
# scales that is the sum of a group: of n groups the errors add up to n times that of one, while the
# sums are √n times as large.
_FP8_SUM_ERROR = 2.0**-13 / 32


def difference(
    got: torch.Tensor, product: torch.Tensor, inputs: Inputs, *, scaled: bool = True
) -> str | None:
    """Return what is wrong with a result, None when every element is close to the reference.

    Without its scales, an element may be off by one rounding to bf16, and by the error of summing
    K products in the operand's accumulators: relative to its own size and to that of its partial
    sums, for which the root mean square of all elements stands.

    Args:
        got: [m, n], the result.
        product: [m, n] fp32, x·wᵀ, as `product` returns it.
        inputs: what was multiplied.
        scaled: whether the result is scaled by x_scale and the weight's scale.
    """
    if got.shape != product.shape:
        return f"got shape {list(got.shape)}, expected {list(product.shape)}"
    scale = torch.ones((), device=got.device)
    in_blocks = inputs.weight.blocks is not None
    if scaled and not in_blocks:
        scale = inputs.x_scale.unsqueeze(1) * inputs.weight.scale
    depth: float = inputs.x.size(1)
    if in_blocks:
        depth = GROUP * math.sqrt(inputs.x_scale.size(0))
    sum_error = _SUM_ERROR.get(inputs.x.dtype, _FP8_SUM_ERROR * depth)
    size = product.abs()
    rms = math.sqrt(product.square().mean().item())
    allowed = (size + rms).mul_(sum_error).add_(size, alpha=_BF16_ROUNDING)
    error = (got / scale - product).abs_().div_(allowed)
    if error.max().item() <= 1:  # False for NaN
        return None
    row, column = divmod(int(error.nan_to_num(nan=math.inf).argmax()), error.size(1))
    expected = (scale * product)[row, column]
    return f"element [{row}, {column}] is {got[row, column]:g}, expected {expected:g}"


def product(inputs: Inputs) -> torch.Tensor:
    """Return x·wᵀ [m, n] fp32; with block scales it is scaled."""
    full_precision(inputs.x.device)
    blocks = inputs.weight.blocks
    if blocks is not None:
        of_channels = blocks.repeat_interleave(GROUP, 0)[: inputs.weight.plain.size(0)]
        x = dequantized(inputs.x, inputs.x_scale.t())
        return x @ dequantized(inputs.weight.plain, of_channels).t()
    return to_float32(inputs.x) @ to_float32(inputs.weight.plain).t()


def _reference(case: Case, inputs: Inputs) -> torch.Tensor:
    return product(inputs)


def _difference(
    got: torch.Tensor, expected: torch.Tensor, inputs: Inputs, layout: Layout
) -> str | None:
    return difference(got, expected, inputs, scaled=layout.scaled)


CHECK = Check(_reference, _difference)
