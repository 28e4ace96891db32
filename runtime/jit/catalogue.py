"""The variants that measurements found worth building, and selections of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import get_args

from .variants import (
    FLOAT_DTYPES,
    OPERAND_DTYPES,
    QUANTIZE_KINDS,
    SPLIT_TOKENS,
    AppendKV,
    AttentionDecode,
    AttentionPrefill,
    DecodeLoad,
    Embed,
    FusedLinear,
    GemmSmallM,
    GemmTiled,
    L2Probe,
    MergeStates,
    Quantize,
    Sample,
    Variant,
    decode_cluster,
    variant_of,
)

QUANTIZE = tuple(
    Quantize(kind=kind, in_dtype=in_dtype, out_dtype=out_dtype)
    for kind, in_dtype in product(QUANTIZE_KINDS, FLOAT_DTYPES)
    for out_dtype in (*OPERAND_DTYPES, *(() if kind == "per_token" else (in_dtype,)))
)
# (max_m, token_warps, row_tiles, x_slots): those of docs/gemm_small_m.md. Three row tiles suit
# weights of three tiles per SM. Beyond 16 tokens the tiled GEMM wins, and in FP8 always.
_SMALL_M = ((8, 1, 2, 4), (16, 1, 2, 4), (16, 1, 3, 4))
GEMM_SMALL_M = tuple(
    GemmSmallM(
        out_dtype=out_dtype,
        max_m=max_m,
        token_warps=token_warps,
        row_tiles=row_tiles,
        x_slots=x_slots,
    )
    for max_m, token_warps, row_tiles, x_slots in _SMALL_M
    for out_dtype in FLOAT_DTYPES
)
# For one token of a 16-bit model, whose output projection may have fp32 results.
FUSED_LINEAR = tuple(
    FusedLinear(kind=kind, in_dtype=in_dtype, out_dtype=out_dtype, max_k=max_k)
    for max_k, in_dtype in product((4096, 8192), ("bf16", "fp16"))
    for kind, out_dtype in (("rms_norm", in_dtype), ("rms_norm", "fp32"), ("per_token", in_dtype))
)
# (channels, tokens, pingpong): those of docs/gemm_tiled.md.
_TILES = (
    *((64, 16, False), (64, 32, False), (128, 32, False)),
    *((channels, 64, False) for channels in (64, 96, 128, 160)),
    *((channels, 128, False) for channels in (64, 96, 128, 160, 192, 224, 256)),
    *((128, 256, False), (128, 128, True)),
)
# For few tokens in FP8: INT8 has gemm_small_m for them.
_FEW_FP8_TILES = ((64, 8, False), (128, 8, False), (128, 16, False))
# fp32 sums beside those of the tensor cores: half the tile fits in the registers.
_EXACT_FP8_TILES = ((64, 16, False), (64, 64, False), (128, 128, False))
GEMM_TILED = tuple(
    GemmTiled(
        dtype=dtype,
        out_dtype=out_dtype,
        channels=channels,
        tokens=tokens,
        pingpong=pingpong,
        fast_accum=fast_accum,
    )
    for dtype, fast_accum, tiles in (
        ("int8", False, _TILES),
        ("e4m3", True, (*_FEW_FP8_TILES, *_TILES)),
        ("e4m3", False, _EXACT_FP8_TILES),
    )
    for (channels, tokens, pingpong), out_dtype in product(tiles, FLOAT_DTYPES)
    # The epilogue's fp32 rows do not fit in the registers beside the sums of the largest tile.
    if (tokens, out_dtype) != (256, "fp32")
)
APPEND_KV = tuple(
    AppendKV(dtype=dtype, cache_dtype=cache_dtype)
    for dtype in FLOAT_DTYPES
    for cache_dtype in (dtype, *OPERAND_DTYPES)
)
# Other head dims, and fixed splits of more rows than most groups have, are compiled when they are
# first used.
ATTENTION_DECODE = tuple(
    AttentionDecode(
        head_dim=head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        columns=columns,
        copy_pages=copy_pages,
        split_tokens=split_tokens,
        cluster=cluster,
    )
    for split_tokens, all_columns in ((0, (8, 16, 32, 64)), (SPLIT_TOKENS, (8, 16)))
    for head_dim, dtype, columns, copy_pages in product(
        (64, 128, 256), ("bf16", "fp16"), all_columns, (True, False)
    )
    for kv_dtype in (dtype, *OPERAND_DTYPES)
    for cluster in dict.fromkeys(
        decode_cluster(
            load,
            head_dim=head_dim,
            columns=columns,
            copy_pages=copy_pages,
            quantized=kv_dtype != dtype,
            batch_invariant=split_tokens > 0,
        )
        for load in get_args(DecodeLoad)
    )
    # The output of 64 columns of 256 does not fit in the registers.
    if (head_dim, columns) != (256, 64)
)
ATTENTION_PREFILL = (
    *(
        AttentionPrefill(head_dim=head_dim, value_dim=value_dim, dtype=dtype, keys=keys)
        for (head_dim, value_dim), dtype, keys in product(
            ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
            ("bf16", "fp16"),
            ("packed", "pages", "slots"),
        )
    ),
    *(
        AttentionPrefill(head_dim=128, dtype=dtype, keys=keys, warpgroups=3)
        for dtype, keys in product(("bf16", "fp16"), ("packed", "pages"))
    ),
    *(
        AttentionPrefill(head_dim=head_dim, dtype="e4m3", out_dtype=out_dtype)
        for head_dim, out_dtype in product((64, 128, 256), ("bf16", "fp16"))
    ),
    *(
        AttentionPrefill(head_dim=128, dtype="e4m3", out_dtype=out_dtype, warpgroups=3)
        for out_dtype in ("bf16", "fp16")
    ),
)
EMBED = tuple(Embed(dtype=dtype) for dtype in FLOAT_DTYPES)
MERGE_STATES = tuple(MergeStates(dtype=dtype) for dtype in FLOAT_DTYPES)
SAMPLE = tuple(Sample(dtype=dtype) for dtype in FLOAT_DTYPES)
CATALOGUE: tuple[Variant, ...] = (
    *QUANTIZE,
    *GEMM_SMALL_M,
    *GEMM_TILED,
    *FUSED_LINEAR,
    *EMBED,
    *APPEND_KV,
    *ATTENTION_DECODE,
    *ATTENTION_PREFILL,
    *MERGE_STATES,
    *SAMPLE,
    L2Probe(),
)


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
        only: families or names of variants, those that the catalogue does not list included;
            empty for all.
        dtypes: names as in `variants`; 8-bit ones choose among operands, the others among inputs
            and outputs, and a kind of which none is named is not restricted.
        among: what to select from.

    Raises:
        ValueError: naming the argument, for a name that no variant has, or when nothing is left.
    """
    chosen = set(dtypes)
    known = (*OPERAND_DTYPES, *FLOAT_DTYPES)
    _check("dtypes", chosen, known)
    unlisted = [variant for name in only if (variant := variant_of(name)) is not None]
    among = list(dict.fromkeys((*among, *unlisted)))
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
