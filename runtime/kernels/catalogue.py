"""The variants that measurements found worth building, and selections of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

from ostinato.kernels.variants import (
    FLOAT_DTYPES,
    OPERAND_DTYPES,
    QUANTIZE_KINDS,
    GemmSmallM,
    GemmTiled,
    Quantize,
    Variant,
)

QUANTIZE = tuple(
    Quantize(kind=kind, in_dtype=in_dtype, out_dtype=out_dtype)
    for kind, in_dtype, out_dtype in product(QUANTIZE_KINDS, FLOAT_DTYPES, OPERAND_DTYPES)
)
# (dtypes, max_m, token_warps, row_tiles, x_slots): those of docs/gemm_small_m.md. Three row tiles
# suit weights of three tiles per SM. FP8 for more tokens spills registers, and the tiled GEMM wins.
_SMALL_M = (
    (OPERAND_DTYPES, 8, 1, 2, 4),
    (OPERAND_DTYPES, 8, 1, 3, 4),
    (OPERAND_DTYPES, 16, 1, 2, 4),
    (OPERAND_DTYPES, 16, 1, 3, 4),
    (("int8",), 32, 1, 2, 2),
    (("int8",), 64, 2, 2, 2),
)
GEMM_SMALL_M = tuple(
    GemmSmallM(
        dtype=dtype,
        out_dtype=out_dtype,
        max_m=max_m,
        token_warps=token_warps,
        row_tiles=row_tiles,
        x_slots=x_slots,
    )
    for dtypes, max_m, token_warps, row_tiles, x_slots in _SMALL_M
    for dtype, out_dtype in product(dtypes, FLOAT_DTYPES)
)
_FEW = {"cluster": (1, 1), "swap_ab": True, "pingpong": True}
# (tile, other fields): those of "Suggested dispatch" in docs/gemm_tiled.md.
_TILES: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((32, 64, 256), _FEW),
    ((64, 64, 256), _FEW),
    ((64, 128, 128), {"cluster": (2, 1), "pingpong": True}),
    ((128, 128, 128), {"cluster": (2, 1)}),
    ((128, 192, 128), {"cluster": (2, 1)}),
    ((128, 224, 128), {"cluster": (2, 1)}),
    ((128, 256, 128), {"cluster": (2, 1), "raster": 1, "swizzle": 4}),
    ((128, 256, 128), {"cluster": (2, 1), "raster": 2, "swizzle": 8}),
)
# Activations with a zero point are rare: one tile for few tokens and one for many will do.
_ZERO_POINT_TILES = (_TILES[1], _TILES[-1])
GEMM_TILED = tuple(
    GemmTiled(
        dtype=dtype,
        out_dtype=out_dtype,
        tile=tile,
        fast_accum=dtype == "e4m3",
        zero_point=zero_point,
        **others,
    )
    for dtype, tiles, zero_point in (
        ("int8", _TILES, False),
        ("int8", _ZERO_POINT_TILES, True),
        ("e4m3", _TILES, False),
    )
    for (tile, others), out_dtype in product(tiles, FLOAT_DTYPES)
)
CATALOGUE: tuple[Variant, ...] = (*QUANTIZE, *GEMM_SMALL_M, *GEMM_TILED)


def families() -> list[str]:
    """Return the names of all families, in the catalogue's order."""
    return list(dict.fromkeys(variant.family for variant in CATALOGUE))


def select(
    *,
    only: Sequence[str] = (),
    dtypes: Iterable[str] = (),
    among: Sequence[Variant] = CATALOGUE,
) -> list[Variant]:
    """Return the variants of these names and dtypes, in the catalogue's order.

    Args:
        only: families or names of variants; empty for all.
        dtypes: names as in `variants`; 8-bit ones choose among operands, the others among inputs
            and outputs, and a kind of which none is named is not restricted.
        among: what to select from.

    Raises:
        ValueError: naming the argument, for a name that no variant has, or when nothing is left.
    """
    chosen = set(dtypes)
    known = (*OPERAND_DTYPES, *FLOAT_DTYPES)
    _check("dtypes", chosen, known)
    _check("only", only, {name for v in among for name in (v.family, v.name)}, families())
    accepted = set().union(
        *(chosen.intersection(kind) or kind for kind in (OPERAND_DTYPES, FLOAT_DTYPES))
    )
    found = [
        variant
        for variant in among
        if (not only or variant.family in only or variant.name in only)
        and variant.dtypes() <= accepted
    ]
    if not found:
        raise ValueError(f"no kernel of {' '.join(only)} has dtypes {' '.join(sorted(chosen))}")
    return found


def _check(
    argument: str, got: Iterable[str], known: Collection[str], shown: Iterable[str] = ()
) -> None:
    for name in got:
        if name not in known:
            expected = " or ".join(shown or known)
            raise ValueError(f"{argument}: got {name!r}, expected {expected}")
