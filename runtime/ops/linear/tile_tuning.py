"""Choices of GEMM kernels that were measured on a machine, and go before the built-in table.

`python -m ostinato tune` writes them as JSON:

    {"gpu": "NVIDIA H200", "source": "0123456789abcdef", "rows": [
        {"dtype": "int8", "n": 6144, "k": 4096, "m_min": 1, "m_max": 8,
         "variant": "gemm_small_m-int8-bf16-…", "tile_channels": 0, "tile_tokens": 0, "cluster": 0,
         "share_weights": 0, "split_k": 0, "band": 0}, …]}

A row holds for products of exactly this dtype, n and k, and for m from `m_min`, the smallest that
was measured and 1 where it is left out, up to `m_max`: of the rows whose kernel may serve a call
(`tile_table.serving`), the one with the smallest m_max counts, so that it begins where the one
before it ends. Calls that no row holds for are left to the built-in table. A variant's output dtype
is only that of the measurement: the row holds for the others as well. Of the numbers after the
variant (see `tile_table.Choice`) those left out are 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ...jit.location import cache_folder
from ...jit.sources import digest, read_sources
from . import tile_table
from .gemm_variants import (
    BLOCK_E4M3,
    GEMM_DTYPES,
    GEMM_SMALL_M,
    GEMM_TILED,
    GemmSmallM,
    GemmTiled,
)
from .packed_weight import TILE_CHANNELS
from .tile_table import CUT, Choice, GemmVariant

VARIABLE = "OSTINATO_GEMM_TABLE"
_GEMMS: tuple[GemmVariant, ...] = (*GEMM_SMALL_M, *GEMM_TILED)
_VARIANTS = {variant.name: variant for variant in _GEMMS}
_TILED_LIMITS = {"cluster": 2, "share_weights": 1, "split_k": 2, "band": 2**31 - 1}
_KEYS = {"dtype", "n", "k", "m_max", "variant"}
_OPTIONAL = ("m_min", *CUT)


@dataclass(frozen=True)
class TunedRow:
    """What is best for m from `m_min` to `m_max`, less those of rows that end before."""

    m_min: int
    m_max: int
    choice: Choice


# Rows by (dtype, n, k), those of a key in order of m_max.
Tuning = Mapping[tuple[str, int, int], Sequence[TunedRow]]


def tuning_path() -> Path:
    """Return the file that is read unless OSTINATO_GEMM_TABLE names another."""
    return cache_folder() / "gemm_table.json"


def sources_hash() -> str:
    """Return a hash of the sources of both GEMM kernels: other sources, other times."""
    kernels = (GemmSmallM, GemmTiled)
    return digest(part for kernel in kernels for part in read_sources(kernel.source).parts)


def override(path: str | os.PathLike[str] | None) -> None:
    """Use this file from now on, or with None again the one that the environment names.

    Launches that a graph has captured stay as they are.

    Raises:
        OSError: when it cannot be read.
        ValueError: naming the file, when it is no such document. Its rows are read at the next
            call, if they hold for the GPU.
    """
    global _overriding
    chosen = None if path is None else Path(path)
    if chosen is not None:
        read_document(chosen)
    _overriding = chosen
    forget()


def forget() -> None:
    """Read the files anew at the next call."""
    tuning_for.cache_clear()
    choose.cache_clear()


_overriding: Path | None = None


@cache
def tuning_for(gpu: str) -> Tuning:
    """Return the rows that hold for a GPU of this name ("" for none), and say why a file's do not.

    Raises:
        OSError: when a file cannot be read, or OSTINATO_GEMM_TABLE names none.
        ValueError: naming the file and the row, when it is not as this module says.
    """
    if not gpu:
        return {}
    named = os.environ.get(VARIABLE)
    path = _overriding or (Path(named) if named else tuning_path())
    if path == tuning_path() and not path.exists():
        return {}
    return read(path, gpu)


def read(path: Path, gpu: str) -> Tuning:
    """Return the rows of a file if they hold for a GPU of this name, and say why if they do not.

    Raises:
        OSError: when it cannot be read.
        ValueError: naming the file and the row, when it is not as this module says.
    """
    document = read_document(path)
    # Before the rows: those of other sources may name kernels that there are no more.
    for what, got, here in (
        ("GPU", document["gpu"], gpu),
        ("source", document["source"], sources_hash()),
    ):
        if got != here:
            print(
                f"ostinato: {path}: ignored: measured on another {what} ({got}; this one is "
                f"{here}); run `python -m ostinato tune`",
                file=sys.stderr,
                flush=True,
            )
            return {}
    return _rows(path, document["rows"])


@lru_cache(maxsize=1 << 14)
def choose(
    gpu: str,
    sms: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str,
    packed: bool,
    fast_accum: bool,
    batch_invariant: bool,
) -> Choice:
    """Return the kernel for a product on a GPU: the tuned one, else the table's.

    The arguments are those of `tile_table.choose`, after the GPU's name; all are positional, since
    this is called at every launch.
    """
    for row in tuning_for(gpu).get((dtype, n, k), ()):
        if not row.m_min <= m <= row.m_max:
            continue
        wanted = replace(row.choice, variant=replace(row.choice.variant, out_dtype=out_dtype))
        choice = tile_table.serving(wanted, m, n, packed, fast_accum, batch_invariant, sms)
        if choice is not None:
            return tile_table.evened(choice, m)
    return tile_table.choose(
        m,
        n,
        k,
        dtype,
        out_dtype,
        packed=packed,
        fast_accum=fast_accum,
        batch_invariant=batch_invariant,
        sms=sms,
    )


def variants(
    gpu: str,
    sms: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str,
    *,
    fast_accum: bool,
    batch_invariant: bool,
) -> list[GemmVariant]:
    """Return every kernel that a packed weight [n, k] may be multiplied by, whatever m."""
    rows = tuning_for(gpu).get((dtype, n, k), ())
    ends = {m for row in rows for m in (row.m_min - 1, row.m_max) if m}
    found = (
        choose(gpu, sms, m, n, k, dtype, out_dtype, True, fast_accum, batch_invariant).variant
        for m in sorted({*tile_table.largest_ms(), *ends})
    )
    return list(dict.fromkeys(found))


def read_document(path: Path) -> dict[str, Any]:
    """Return a file's gpu, source and rows, which are not looked at.

    Raises:
        OSError: when it cannot be read.
        ValueError: naming the file, when it is no such document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: got {type(document).__name__}, expected an object")
    for name, kind in (("gpu", str), ("source", str), ("rows", list)):
        if not isinstance(document.get(name), kind):
            got = type(document.get(name)).__name__
            raise ValueError(f"{path}: {name}: got {got}, expected {kind.__name__}")
    return document


def _rows(path: Path, rows: list[Any]) -> Tuning:
    tuned: dict[tuple[str, int, int], list[TunedRow]] = {}
    for index, row in enumerate(rows):
        try:
            key, tuned_row = _row(row)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: rows[{index}]: {error}") from error
        tuned.setdefault(key, []).append(tuned_row)
    for of_key in tuned.values():
        of_key.sort(key=lambda row: row.m_max)
    return tuned


def _row(row: Any) -> tuple[tuple[str, int, int], TunedRow]:
    if not isinstance(row, dict):
        raise ValueError(f"got {type(row).__name__}, expected an object")
    if not _KEYS <= set(row) <= {*_KEYS, *_OPTIONAL}:
        raise ValueError(
            f"got {sorted(row)}, expected {sorted(_KEYS)} and perhaps {', '.join(_OPTIONAL)}"
        )
    dtype, variant = row["dtype"], _VARIANTS.get(row["variant"])
    known = (*GEMM_DTYPES, BLOCK_E4M3)
    if dtype not in known:
        raise ValueError(f"dtype: got {dtype!r}, expected {' or '.join(known)}")
    if variant is None or variant.operands != dtype:
        raise ValueError(f"variant: got {row['variant']!r}, expected a compiled GEMM of {dtype}")
    for name in ("n", "k", "m_max"):
        _integer(name, row[name], least=1)
    m_min = row.get("m_min", 1)
    _integer("m_min", m_min, least=1, most=row["m_max"])
    tuned = TunedRow(m_min, row["m_max"], _choice(variant, row))
    return (dtype, row["n"], row["k"]), tuned


def _choice(variant: GemmVariant, row: dict[str, Any]) -> Choice:
    limits = dict.fromkeys(CUT, 0)
    if isinstance(variant, GemmSmallM):
        _integer("m_max", row["m_max"], least=1, most=variant.max_m)
    else:
        sizes = {"tile_channels": variant.channels, "tile_tokens": variant.tokens}
        limits = {**_TILED_LIMITS, **sizes}
    cut = {name: row.get(name, 0) for name in CUT}
    for name, most in limits.items():
        _integer(name, cut[name], least=0, most=most)
    if cut["tile_channels"] % TILE_CHANNELS:
        raise ValueError(f"tile_channels: got {cut['tile_channels']}, expected a multiple of 16")
    for name in ("share_weights", "split_k"):
        if cut[name] and cut["cluster"] != 2:
            got = f"{cut[name]} with cluster {cut['cluster']}"
            raise ValueError(f"{name}: got {got}, expected cluster 2")
    if cut["split_k"] == 2 and cut["share_weights"]:
        raise ValueError("split_k: got 2 with share_weights 1, expected share_weights 0")
    return Choice(variant, **cut)


def _integer(name: str, value: Any, *, least: int, most: int = 2**31 - 1) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}: got {value!r}, expected an integer in {least}..{most}")
