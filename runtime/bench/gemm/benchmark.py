"""W8A8 products: ours and the peers', checked and then timed side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import torch

from ...ops.common.e4m3 import to_float32
from ...ops.common.precision import full_precision
from ..graphs.timing import (
    RESTED,
    Pace,
    interleave,
    rotate,
)
from ..report import Row
from ..results import CaseResult
from .cases import Case
from .impls import Implementation
from .inputs import (
    Inputs,
    random_inputs,
    random_weights,
)

_BF16_ROUNDING = 2.0**-8
# Of the accumulators, relative: fp32 sums of exact products, and what cuBLAS does to bf16.
_SUM_ERROR = {torch.int8: 1e-3, torch.bfloat16: 2.0**-6}
# Fast accumulation keeps about 13 fraction bits of the sum, after every 32 products.
_FP8_SUM_ERROR = 2.0**-13 / 32


def time_cases(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    device: torch.device,
    *,
    pace: Pace = RESTED,
) -> Iterator[CaseResult[Case]]:
    """Time every implementation in every case, yielding cases as they are measured.

    Args:
        cases: in the order of their shapes, whose weights are kept from one to the next.
        implementations: who multiplies.
        device: where; what is measured on the CPU is only good for trying this out.
        pace: whether each begins on a card at rest or when its clock has settled.
    """
    operands = dict.fromkeys(implementation.operand for implementation in implementations)
    turn = 0
    for shape, of_shape in groupby(cases, lambda case: case.shape):
        weights = random_weights(shape, operands, device)
        for case in of_shape:
            inputs = random_inputs(case, weights)
            yield _time_case(case, implementations, inputs, device, turn, pace)
            turn += 1
            del inputs
        del weights
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the pools of this shape's graphs


def _time_case(
    case: Case,
    implementations: Sequence[Implementation],
    inputs: dict[str, list[Inputs]],
    device: torch.device,
    turn: int,
    pace: Pace,
) -> CaseResult[Case]:
    result = CaseResult(case)
    products = {name: product(sets[0]) for name, sets in inputs.items()}
    rotations = {}
    for impl in implementations:
        if case.m < impl.min_m:
            continue
        sets = inputs[impl.operand]
        # What is not written must not pass for a result of the implementation before.
        sets[0].out.fill_(torch.nan)
        try:
            got = impl.call(sets[0])
        except (RuntimeError, ValueError) as error:
            result.refuse(impl.name, error, is_ours=impl.is_ours)
            continue
        wrong = difference(got, products[impl.operand], sets[0], scaled=impl.scaled)
        if wrong is not None:
            result.failures[impl.name] = f"wrong result: {wrong}"
            continue
        rotations[impl] = rotate([partial(impl.call, one) for one in sets], device)
    turns = list(rotations.values())
    seconds = interleave(turns, device, start=turn, pace=pace)
    n, k = case.shape.n, case.shape.k
    result.rows = [
        Row.of(
            "gemm",
            str(case),
            impl.name,
            seconds=statistics.median(times),
            num_bytes=impl.num_bytes(case.m, n, k),
            flops=case.flops,
        )
        for impl, times in zip(rotations, seconds, strict=True)
    ]
    return result


def difference(
    got: torch.Tensor, product: torch.Tensor, inputs: Inputs, *, scaled: bool = True
) -> str | None:
    """Return what is wrong with a result, None when every element is close to the reference.

    Without its scales, an element may be off by one rounding to bf16, and by the error of summing
    K products in the operand's accumulators: relative to its own size and to that of its partial
    sums, for which the root mean square of all elements stands.

    Args:
        got: [m, n], the result.
        product: [m, n] fp32, x·wᵀ.
        inputs: what was multiplied.
        scaled: whether the result is scaled by x_scale and the weight's scale.
    """
    if got.shape != product.shape:
        return f"got shape {list(got.shape)}, expected {list(product.shape)}"
    scale = torch.ones((), device=got.device)
    if scaled:
        scale = inputs.x_scale.unsqueeze(1) * inputs.weight.scale
    sum_error = _SUM_ERROR.get(inputs.x.dtype, _FP8_SUM_ERROR * inputs.x.size(1))
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
    """Return x·wᵀ [m, n] fp32."""
    full_precision(inputs.x.device)
    return to_float32(inputs.x) @ to_float32(inputs.weight.plain).t()
