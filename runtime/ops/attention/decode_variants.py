"""The kernels of decode attention, and how many CTAs of one share a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.targets import HOPPER
from ...jit.variant import OPERAND_DTYPES, Variant, check

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
            up to 128, more than 64 with a cache of 8 bits.
    """

    family: ClassVar[str] = "attention_decode"
    source: ClassVar[Path] = CSRC / "attention" / "decode" / "decode_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})
    name_pattern: ClassVar[str] = (
        r"(?P<dtype>\w+)(-(?P<kv_dtype>\w+)_kv)?-d(?P<head_dim>\d+)-c(?P<columns>\d+)"
        r"(?P<any_page>-any_page)?(-split(?P<split_tokens>\d+))?(-cluster(?P<cluster>\d+))?"
    )

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
            # A warp loads 32 elements of 8 bits at once, and has a fourth of the head dim.
            least = 0 if self.kv_dtype == self.dtype else 64
            shared = self.columns == 8 and least < self.head_dim <= 128
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

    @staticmethod
    def fields_of(groups: dict[str, Any]) -> dict[str, Any]:
        any_page = groups.pop("any_page", None)
        return groups if any_page is None else {**groups, "copy_pages": False}

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


# How much there is to do for a launch of decode attention, as far as the host knows: how many
# segments it has, and whether those between "some" and "many" may be long.
DecodeLoad = Literal["few", "some", "some_long", "many"]


def decode_cluster(
    load: DecodeLoad,
    *,
    head_dim: int,
    columns: int,
    copy_pages: bool,
    quantized: bool,
    batch_invariant: bool,
) -> int:
    """Return the CTAs of a cluster of the fastest kernel (docs/notebooks/decode.md).

    With `batch_invariant` the load changes no bit.
    """
    alone = 1
    if not copy_pages or columns > _MOST_COLUMNS_OF_CLUSTERS:
        return alone
    if batch_invariant:
        return 4 if load == "few" and columns == 8 and 64 < head_dim <= 128 else alone
    least_work = columns == 8 and not quantized  # for a byte of the cache
    if head_dim > 128:
        return 2 if least_work and load in ("few", "some") else alone
    if load == "many":
        return alone
    if load == "some_long":
        return 2 if least_work and head_dim > 64 else alone
    return 8 if load == "few" else 2


# Other head dims, and fixed splits of more rows than most groups have, are compiled when they are
# first used.
_LISTED = tuple(
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
register_family(AttentionDecode, _LISTED)
