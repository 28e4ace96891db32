"""The kernels and tiles to time for a product: all that may be the fastest, and few more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...ops.linear.gemm_variants import DTYPES_16_BIT, GemmSmallM, GemmTiled
from ...ops.linear.tile_cost_model import Cut, predictions
from ...ops.linear.tile_table import H200_SMS, Choice, GemmVariant, serving
from ..gemm.cases import Case

# What the model takes for this much slower than its fastest is not timed. What was the fastest of
# those that it was fitted to, with few tokens it took for up to 28% slower.
_WITHIN_FEW_TOKENS, _FEW_TOKENS = 1.3, 512
_WITHIN = 1.15
_MOST_OF_A_KERNEL = 4
_BANDED_M = 1024  # with fewer tokens all tiles of a band are in flight anyway
_BANDS = (0, 1, 8)


def candidates(case: Case, variants: Iterable[GemmVariant], *, sms: int = H200_SMS) -> list[Choice]:
    """Return the choices to time for a product, the ones of the simplest kernels first.

    Args:
        case: the product.
        variants: compiled kernels of one dtype, output dtype and kind of accumulation.
        sms: multiprocessors of the GPU.
    """
    given = list(variants)
    tiled = sorted(
        (v for v in given if isinstance(v, GemmTiled)),
        key=lambda v: (v.pingpong, v.channels, v.tokens),
    )
    found = dict.fromkeys([*_streaming(case.m, given), *_tiled(case, tiled, sms)])
    n = case.shape.n
    in_order = any(variant.dtype in DTYPES_16_BIT for variant in given)
    return [c for c in found if serving(c, case.m, n, True, True, in_order, sms) == c]


def _streaming(m: int, variants: Sequence[GemmVariant]) -> Iterator[Choice]:
    able = [v for v in variants if isinstance(v, GemmSmallM) and v.max_m >= m]
    least = min((v.max_m for v in able), default=0)
    return (Choice(v) for v in able if v.max_m == least)


def _tiled(case: Case, variants: Sequence[GemmTiled], sms: int) -> Iterator[Choice]:
    m, n, k = case.m, case.shape.n, case.shape.k
    predicted: dict[GemmTiled, list[tuple[float, Cut]]] = {variant: [] for variant in variants}
    for us, variant, cut in predictions(tuple(variants), m, n, k, sms):
        predicted[variant].append((us, cut))
    within = _WITHIN_FEW_TOKENS if m <= _FEW_TOKENS else _WITHIN
    most = within * min((us for of in predicted.values() for us, _ in of), default=0)
    for variant, of_kernel in predicted.items():
        for us, cut in sorted(of_kernel)[:_MOST_OF_A_KERNEL]:
            if us > most:
                break
            for band in _BANDS if m >= _BANDED_M else (0,):
                yield Choice(variant, **cut._asdict(), band=band)
