"""Measuring which kernel and which tile are the fastest for a product."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...jit.loader import load
from ...ops.common.device import address_of, current_stream, on_device
from ...ops.linear import tile_table
from ...ops.linear.gemm_variants import DTYPES_16_BIT, GEMM_SMALL_M, GEMM_TILED
from ...ops.linear.tile_table import Choice, GemmVariant
from ..gemm.cases import Case, Shape
from ..gemm.check import difference, product
from ..gemm.inputs import Inputs, random_inputs, random_weights
from ..harness.rotation import Call, interleave, rotate
from ..timing import time_each
from .candidates import candidates

# Tokens for which the choice is measured: powers of two, and the tiles' sizes between them. A
# choice holds down to the next smaller one.
TUNED_M = (
    *(1, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 8192),
)
_QUICK_REPLAY_S = 5e-4
_QUICK_REPLAYS = 3
_FINALIST_WITHIN = 1.05  # of the quick measurement's best
_MOST_FINALISTS = 6
_TIE_WITHIN = 1.01


@dataclass(frozen=True)
class Timed:
    """A choice and its microseconds; `final` when they are the median of a full measurement.

    `failure` says why there is no time, which is infinite then: the launch was refused, or the
    result was wrong.
    """

    choice: Choice
    us: float
    final: bool = False
    failure: str = ""


@dataclass(frozen=True)
class Tuned:
    """The best choice for a number of tokens, and its microseconds."""

    m: int
    choice: Choice
    us: float


def tunable_variants(operand: str) -> list[GemmVariant]:
    """Return the compiled kernels with these operands and bf16 outputs, e4m3 accumulating fast."""
    return [
        *(v for v in GEMM_SMALL_M if v.operands == operand and v.out_dtype == "bf16"),
        *(
            v
            for v in GEMM_TILED
            if v.operands == operand
            and v.out_dtype == "bf16"
            and v.fast_accum == (operand == "e4m3")
        ),
    ]


def choices(case: Case, operand: str, sms: int) -> list[Choice]:
    """Return what to time for a product: the built-in table's choice, and the candidates.

    Args:
        case: the product.
        operand: "int8", "e4m3", "bf16" or `BLOCK_E4M3`.
        sms: multiprocessors of the GPU.
    """
    n, k = case.shape.n, case.shape.k
    in_order = operand in DTYPES_16_BIT
    built_in = tile_table.choose(
        case.m, n, k, operand, "bf16", packed=True, batch_invariant=in_order, sms=sms
    )
    found = candidates(case, tunable_variants(operand), sms=sms)
    return list(dict.fromkeys([built_in, *found]))


def tune_shape(
    shape: Shape,
    operands: Sequence[str],
    tokens: Sequence[int],
    device: torch.device,
    report: Callable[[str, Case, Sequence[Timed]], None],
) -> dict[str, list[Tuned]]:
    """Return the rows of a table for products of a shape, by operand.

    Args:
        shape: of the weights.
        operands: some of "int8", "e4m3", "bf16" and `BLOCK_E4M3`.
        tokens: for which the choices are timed.
        device: a CUDA device with its index; the kernels should be compiled.
        report: called with what was timed in each case.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    weights = random_weights(shape, operands, device)
    tuned: dict[str, list[Tuned]] = {operand: [] for operand in operands}
    for m in tokens:
        case = Case(shape, m)
        for operand, sets in random_inputs(case, weights).items():
            timed = time_choices(choices(case, operand, sms), sets, device)
            best = fastest(timed)
            tuned[operand].append(Tuned(m, best.choice, best.us))
            report(operand, case, timed)
    return {operand: monotone(rows) for operand, rows in tuned.items()}


def time_choices(
    choices: Sequence[Choice], sets: Sequence[Inputs], device: torch.device
) -> list[Timed]:
    """Time all choices quickly and the best of them, and the first one, again and in full.

    Args:
        choices: at least one; the first is that of the built-in table.
        sets: inputs that exceed the L2 together.
        device: a CUDA device.

    Raises:
        RuntimeError: when all of them fail.
    """
    timed = [_quick(choice, sets, device) for choice in choices]
    best = min(one.us for one in timed)
    ranked = sorted(timed[1:], key=lambda one: one.us)
    close = [one for one in ranked if one.us <= _FINALIST_WITHIN * best][:_MOST_FINALISTS]
    expected = product(sets[0])
    checked = [_checked(one, sets[0], expected, device) for one in (timed[0], *close)]
    finalists = [one for one in checked if not one.failure]
    if not finalists:
        raise RuntimeError(f"no kernel works, the table's neither: {timed[0].failure}")
    rotations = [rotate(_calls(one.choice, sets, device), device) for one in finalists]
    results = {one.choice: one for one in (*timed, *checked)}
    for one, seconds in zip(finalists, interleave(rotations, device), strict=True):
        us = 1e6 * statistics.median(seconds)
        results[one.choice] = Timed(one.choice, us, final=True)
    return [results[choice] for choice in choices]


def fastest(timed: Sequence[Timed]) -> Timed:
    """Return the first of those that were measured in full and tie with the best of them."""
    finalists = [one for one in timed if one.final]
    best = min(one.us for one in finalists)
    return next(one for one in finalists if one.us <= _TIE_WITHIN * best)


def monotone(tuned: Sequence[Tuned]) -> list[Tuned]:
    """Return the rows of a table in which time grows with m: what is worth having, m ascending.

    A row that is slower than one for more tokens, or chooses the same, is left out: the next one
    serves its tokens, too.
    """
    kept: list[Tuned] = []
    us = math.inf  # of the choice kept last, for as few tokens as the row has
    for row in sorted(tuned, key=lambda row: row.m, reverse=True):
        if row.us < us:
            us = row.us
            if not kept or row.choice != kept[-1].choice:
                kept.append(row)
    return kept[::-1]


def _calls(choice: Choice, sets: Sequence[Inputs], device: torch.device) -> list[Call]:
    return [partial(_launch, choice, inputs, device.index) for inputs in sets]


def _launch(choice: Choice, inputs: Inputs, device: int) -> None:
    m, n = inputs.out.shape
    scaled = inputs.x.dtype is not torch.bfloat16
    x_scale, w_scale = (inputs.x_scale, inputs.weight.scale) if scaled else (None, None)
    with on_device(device):
        stream = current_stream(device)
        load(choice.variant, device=device, stream=stream).launch(
            x=inputs.x.data_ptr(),
            x_stride=inputs.x.stride(0),
            w=inputs.weight.packed.data.data_ptr(),
            w_stride=0,
            x_scale=address_of(x_scale),
            x_scale_stride=inputs.x_scale_stride,
            w_scale=address_of(w_scale),
            w_scale_stride=inputs.weight.scale_stride,
            out=inputs.out.data_ptr(),
            out_stride=inputs.out.stride(0),
            m=m,
            n=n,
            k=inputs.x.size(1),
            **choice.cut,
            pdl=True,
            stream=stream,
        )


def _quick(choice: Choice, sets: Sequence[Inputs], device: torch.device) -> Timed:
    try:
        rotation = rotate(_calls(choice, sets, device), device, min_seconds=_QUICK_REPLAY_S)
    except RuntimeError as error:
        return Timed(choice, math.inf, failure=str(error))
    rotation.replay()
    times = time_each(rotation.replay, device, _QUICK_REPLAYS)
    return Timed(choice, 1e6 * statistics.median(times) / rotation.launches)


def _checked(timed: Timed, inputs: Inputs, expected: torch.Tensor, device: torch.device) -> Timed:
    """Return what was timed, as a failure if its result is wrong."""
    if timed.failure:
        return timed
    inputs.out.fill_(torch.nan)
    _launch(timed.choice, inputs, device.index)
    wrong = difference(inputs.out, expected, inputs, scaled=inputs.x.dtype is not torch.bfloat16)
    if wrong is None:
        return timed
    return Timed(timed.choice, math.inf, failure=f"wrong result: {wrong}")
