"""Attention, and how many CTAs of a decode kernel share a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ..sources import CSRC
from ..targets import HOPPER
from .base import (
    OPERAND_DTYPES,
    Variant,
    check,
)

# Of batch-invariant attention: few enough that one long sequence keeps most SMs busy, so many that
# the partial results of a large batch stay small.
SPLIT_TOKENS = 1024
_DECODE_TILE = 64  # tokens, of a CTA (csrc: kShareTokens)
_MOST_COLUMNS_OF_CLUSTERS = 16


@dataclass(frozen=True, kw_only=True)
class AttentionDecode(Variant):
    """Attention of few queries per sequence to a paged cache, planned on the device.

    Args:
        head_dim: a multiple of 16 up to 256.
        dtype: of the query and the output, bf16 or fp16.
        kv_dtype: of the cache: `dtype`, int8 or e4m3.
        columns: most queries of a sequence times query heads of a KV head: 8, 16, 32 or 64.
        copy_pages: pages of a multiple of 16 tokens, copied by TMA; otherwise pages of any size,
            gathered by threads.
        split_tokens: 0 shares sequences as it suits the load; else SMs share them in splits of so
            many tokens, a multiple of 64, and a result does not depend on other sequences.
        cluster: CTAs, 1, 2, 4 or 8, that share what is one's otherwise, and add up their results
            in each other's shared memory. With splits 1, or 4 with the same bits: for 8 columns of
            up to 128 and a cache of `dtype`.
    """

    family: ClassVar[str] = "attention_decode"
    source: ClassVar[Path] = CSRC / "attention" / "decode" / "decode_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})

    head_dim: int
    dtype: str
    kv_dtype: str = ""
    columns: int = 8
    copy_pages: bool = True
    split_tokens: int = 0
    cluster: int = 1

    def __post_init__(self) -> None:
        check("dtype", self.dtype, ("bf16", "fp16"))
        check("cluster", self.cluster, (1, 2, 4, 8))
        if not self.kv_dtype:
            object.__setattr__(self, "kv_dtype", self.dtype)
        check("kv_dtype", self.kv_dtype, (self.dtype, *OPERAND_DTYPES))
        check("columns", self.columns, (8, 16, 32, 64))
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            raise ValueError(
                f"head_dim: got {self.head_dim}, expected a multiple of 16 from 16 to 256"
            )
        if self.split_tokens:
            shared = self.columns == 8 and self.head_dim <= 128 and self.kv_dtype == self.dtype
            check("cluster", self.cluster, (1, 4) if shared else (1,))
        tile = self.cluster * _DECODE_TILE
        if self.split_tokens < 0 or self.split_tokens % tile:
            raise ValueError(
                f"split_tokens: got {self.split_tokens}, expected a multiple of {tile}"
            )

    @property
    def name(self) -> str:
        pages = "" if self.copy_pages else "-any_page"
        cache = "" if self.kv_dtype == self.dtype else f"-{self.kv_dtype}_kv"
        split = f"-split{self.split_tokens}" if self.split_tokens else ""
        cluster = f"-cluster{self.cluster}" if self.cluster > 1 else ""
        shape = f"d{self.head_dim}-c{self.columns}{pages}{split}{cluster}"
        return f"{self.family}-{self.dtype}{cache}-{shape}"

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_HEAD_DIM": str(self.head_dim),
            "OSTINATO_TYPE": {"bf16": "__nv_bfloat16", "fp16": "__half"}[self.dtype],
            "OSTINATO_CACHE": {"e4m3": "E4m3", "int8": "Int8"}.get(self.kv_dtype, "Same"),
            "OSTINATO_COLUMNS": str(self.columns),
            "OSTINATO_COPY_PAGES": str(int(self.copy_pages)),
            "OSTINATO_FIXED_TILES": str(self.split_tokens // _DECODE_TILE),
            "OSTINATO_CLUSTER": str(self.cluster),
        }


_PREFILL_TYPES = {"bf16": "__nv_bfloat16", "fp16": "__half", "e4m3": "__nv_fp8_e4m3"}

# How much there is to do for a launch of decode attention, as far as the host knows: segments, and
# whether many of them may be long.
DecodeLoad = Literal["few", "some", "many", "many_long"]


def decode_cluster(
    load: DecodeLoad,
    *,
    head_dim: int,
    columns: int,
    copy_pages: bool,
    quantized: bool,
    batch_invariant: bool,
) -> int:
    """Return the CTAs of a cluster of the fastest kernel (docs/decode.md).

    With `batch_invariant` the load changes no bit.
    """
    alone = 1
    if not copy_pages or columns > _MOST_COLUMNS_OF_CLUSTERS:
        return alone
    least_work = columns == 8 and not quantized  # for a byte of the cache
    if batch_invariant:
        return 4 if load == "few" and least_work and 64 < head_dim <= 128 else alone
    if head_dim > 128:
        return 2 if least_work and load in ("few", "some") else alone
    if load == "many":
        return alone
    if load == "many_long":
        return 2 if least_work and head_dim > 64 else alone
    return 8 if load == "few" else 2


@dataclass(frozen=True, kw_only=True)
class AttentionPrefill(Variant):
    """Attention of many queries per sequence: TMA, wgmma and a persistent grid.

    Args:
        head_dim: a multiple of 16 up to 256; of e4m3 64, 128 or 256.
        dtype: of queries, keys and values: bf16, fp16 or e4m3.
        out_dtype: of the output, bf16 or fp16: `dtype` unless that is e4m3.
        keys: where they and values lie: `packed`, one sequence after the other; `pages` of a
            multiple of 16 tokens, copied by TMA; `slots` of pages of any size, gathered by threads.
        value_dim: of values and the output, a multiple of 16 up to `widest_values`; `head_dim`
            unless told, and always of e4m3.
        warpgroups: that multiply, each 64 queries: 3 of keys, packed or in pages, with head dims of
            128, which is faster where tiles are many; 0 for the usual number.
    """

    family: ClassVar[str] = "attention_prefill"
    source: ClassVar[Path] = CSRC / "attention" / "prefill" / "prefill_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})

    head_dim: int
    dtype: str
    out_dtype: str = ""
    keys: str = "packed"
    value_dim: int = 0
    warpgroups: int = 0

    def __post_init__(self) -> None:
        check("dtype", self.dtype, ("bf16", "fp16", "e4m3"))
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)
        fp8 = self.dtype == "e4m3"
        check("out_dtype", self.out_dtype, ("bf16", "fp16") if fp8 else (self.dtype,))
        check("keys", self.keys, ("packed",) if fp8 else ("packed", "pages", "slots"))
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("head_dim", "value_dim"):
            got = getattr(self, name)
            if got % 16 or not 16 <= got <= 256:
                raise ValueError(f"{name}: got {got}, expected a multiple of 16 from 16 to 256")
        if self.value_dim > (widest := self.widest_values(self.head_dim)):
            raise ValueError(
                f"value_dim: got {self.value_dim}, expected at most {widest} with head_dim = "
                f"{self.head_dim}"
            )
        if fp8:
            check("head_dim", self.head_dim, (64, 128, 256))
            check("value_dim", self.value_dim, (self.head_dim,))
        some_are_wide = self.keys != "slots" and self.head_dim == self.value_dim == 128
        check("warpgroups", self.warpgroups, (0, 3) if some_are_wide else (0,))

    @staticmethod
    def widest_values(head_dim: int) -> int:
        """Return the largest `value_dim` for which shared memory has room.

        Outputs larger than their queries need a place of their own beside these and the rings.
        """
        return 192 if 128 < head_dim <= 192 else 256

    @property
    def params(self) -> tuple[Path, ...]:
        return (
            CSRC / "attention" / "common" / "params.h",
            CSRC / "attention" / "prefill" / "params.h",
        )

    @property
    def name(self) -> str:
        dims = f"d{self.head_dim}" + (
            "" if self.value_dim == self.head_dim else f"v{self.value_dim}"
        )
        out = "" if self.out_dtype == self.dtype else f"-{self.out_dtype}"
        wide = f"-w{self.warpgroups}" if self.warpgroups else ""
        return f"{self.family}-{self.dtype}{out}-{dims}-{self.keys}{wide}"

    def defines(self) -> dict[str, str]:
        tile_keys, warpgroups = self._tile()
        return {
            "OSTINATO_HEAD_DIM": str(self.head_dim),
            "OSTINATO_VALUE_DIM": str(self.value_dim),
            "OSTINATO_TYPE": _PREFILL_TYPES[self.dtype],
            "OSTINATO_OUT": _PREFILL_TYPES[self.out_dtype],
            "OSTINATO_BYTES": str(int(self.dtype == "e4m3")),
            "OSTINATO_KEYS": str(tile_keys),
            "OSTINATO_CONSUMERS": str(warpgroups),
            "OSTINATO_SOURCE": {"packed": "Packed", "pages": "Pages", "slots": "Slots"}[self.keys],
        }

    def _tile(self) -> tuple[int, int]:
        """Return the keys of a tile and the warpgroups that multiply.

        Two stages of keys and values must fit in shared memory beside the queries, and scores,
        weights and outputs in the registers.
        """
        dims = (self.head_dim, self.value_dim)
        if self.dtype == "e4m3":
            wide = self.head_dim == 64 or self.warpgroups == 3
            return (96, 3) if wide else {128: (128, 2), 256: (96, 2)}[self.head_dim]
        if max(dims) <= 64 and self.keys != "slots":  # whose threads need more registers
            return 64, 3
        if self.warpgroups == 3:
            return 64, 3
        if max(dims) <= 128:
            return 128, 2
        if self.head_dim <= 192 and self.value_dim <= 128:
            return 112, 2
        return (96, 2) if max(dims) <= 192 else (64, 2)
