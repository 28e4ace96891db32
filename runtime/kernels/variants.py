"""Which kernels exist: one frozen dataclass per family, one instance per library to compile.

A variant is a fixed source file and the macros it is compiled with; the file's head says what each
macro means. `ostinato.kernels.catalogue` lists the variants that the ops use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from ostinato.kernels.sources import CSRC

# The names that variants and the command line give to torch's dtypes; those of 8 bits first.
OPERAND_DTYPES = ("int8", "e4m3")
FLOAT_DTYPES = ("bf16", "fp16", "fp32")
QUANTIZE_KINDS = ("per_token", "rms_norm", "silu_mul")


@dataclass(frozen=True)
class Variant(ABC):
    """What every family has: a source, a name, and the macros that choose the kernel.

    `arch` is the compute capability of the GPU, with the suffix of its specific features.
    """

    family: ClassVar[str]
    source: ClassVar[Path]

    arch: str = "90a"

    @property
    def params(self) -> tuple[Path, ...]:
        """The headers of the struct that its launch takes."""
        return (self.source.with_name("params.h"),)

    @property
    @abstractmethod
    def name(self) -> str:
        """The family and the field values, unique among all variants."""

    @abstractmethod
    def defines(self) -> dict[str, str]:
        """Return the macros, without -D."""

    def dtypes(self) -> set[str]:
        """Return the names of all dtypes that the kernel reads or writes."""
        known = (*OPERAND_DTYPES, *FLOAT_DTYPES)
        return {value for f in fields(self) if (value := getattr(self, f.name)) in known}


@dataclass(frozen=True, kw_only=True)
class Quantize(Variant):
    """Rows of 16/32-bit values to 8-bit rows and scales, after an optional norm or activation.

    Args:
        kind: per_token (as they are), rms_norm (with a residual added before, if given) or
            silu_mul (of [gate | up]).
        in_dtype: of x and the residual.
        out_dtype: int8 or e4m3.
        weight_dtype: of the norm's weight: in_dtype, or fp32.
    """

    family: ClassVar[str] = "quantize"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "quantize.cu"

    kind: str
    in_dtype: str
    out_dtype: str
    weight_dtype: str = ""

    def __post_init__(self) -> None:
        _check("kind", self.kind, QUANTIZE_KINDS)
        _check("in_dtype", self.in_dtype, FLOAT_DTYPES)
        _check("out_dtype", self.out_dtype, OPERAND_DTYPES)
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.in_dtype)
        others = ("fp32",) if self.kind == "rms_norm" else ()
        _check("weight_dtype", self.weight_dtype, (self.in_dtype, *others))

    @property
    def name(self) -> str:
        weight = "" if self.weight_dtype == self.in_dtype else f"-{self.weight_dtype}_weight"
        return f"{self.family}-{self.kind}-{self.in_dtype}-{self.out_dtype}{weight}"

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_KIND": self.kind,
            "OSTINATO_IN_DTYPE": self.in_dtype,
            "OSTINATO_OUT_DTYPE": self.out_dtype,
            "OSTINATO_WEIGHT_DTYPE": self.weight_dtype,
        }


# Of batch-invariant attention: few enough that one long sequence keeps most SMs busy, so many that
# the partial results of a large batch stay small.
SPLIT_TOKENS = 1024
_DECODE_TILE = 64  # tokens, of a pass of a CTA (csrc: kShareTokens)
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
            in each other's shared memory.
        passes: 1, 2 or 4 of each of them: results are, bit by bit, those of so many times as many
            CTAs. Splits are of a multiple of 64 tokens for each pass of each CTA.
    """

    family: ClassVar[str] = "attention_decode"
    source: ClassVar[Path] = CSRC / "attention" / "decode_sm90.cu"

    head_dim: int
    dtype: str
    kv_dtype: str = ""
    columns: int = 8
    copy_pages: bool = True
    split_tokens: int = 0
    cluster: int = 1
    passes: int = 1

    def __post_init__(self) -> None:
        _check("dtype", self.dtype, ("bf16", "fp16"))
        _check("cluster", self.cluster, (1, 2, 4, 8))
        _check("passes", self.passes, (1, 2, 4))
        if not self.kv_dtype:
            object.__setattr__(self, "kv_dtype", self.dtype)
        _check("kv_dtype", self.kv_dtype, (self.dtype, *OPERAND_DTYPES))
        _check("columns", self.columns, (8, 16, 32, 64))
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            raise ValueError(
                f"head_dim: got {self.head_dim}, expected a multiple of 16 from 16 to 256"
            )
        tile = self.cluster * self.passes * _DECODE_TILE
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
        passes = f"-passes{self.passes}" if self.passes > 1 else ""
        shape = f"d{self.head_dim}-c{self.columns}{pages}{split}{cluster}{passes}"
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
            "OSTINATO_PASSES": str(self.passes),
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
) -> tuple[int, int]:
    """Return the cluster and the passes of the fastest kernel (docs/decode.md).

    With `batch_invariant` the load changes no bit: all have as many passes of CTAs.
    """
    alone = (1, 1)
    if not copy_pages or columns > _MOST_COLUMNS_OF_CLUSTERS:
        return alone
    least_work = columns == 8 and not quantized  # for a byte of the cache
    if batch_invariant:
        if not least_work or not 64 < head_dim <= 128:
            return alone
        return {"few": (4, 1), "some": (2, 2), "many": (1, 4), "many_long": (1, 4)}[load]
    if head_dim > 128:
        return (2, 1) if least_work and load in ("few", "some") else alone
    if load == "many":
        return alone
    if load == "many_long":
        return (2, 1) if least_work and head_dim > 64 else alone
    return (8, 1) if load == "few" else (2, 1)


@dataclass(frozen=True, kw_only=True)
class AttentionPrefill(Variant):
    """Attention of many queries per sequence: TMA, wgmma and a persistent grid.

    Args:
        head_dim: a multiple of 16 up to 256; of e4m3 64, 128 or 256.
        dtype: of queries, keys and values: bf16, fp16 or e4m3.
        out_dtype: of the output, bf16 or fp16: `dtype` unless that is e4m3.
        keys: where they and values lie: `packed`, one sequence after the other; `pages` of a
            multiple of 16 tokens, copied by TMA; `slots` of pages of any size, gathered by threads.
        value_dim: of values and the output; `head_dim` unless told, and always of e4m3.
    """

    family: ClassVar[str] = "attention_prefill"
    source: ClassVar[Path] = CSRC / "attention" / "prefill_sm90.cu"

    head_dim: int
    dtype: str
    out_dtype: str = ""
    keys: str = "packed"
    value_dim: int = 0

    def __post_init__(self) -> None:
        _check("dtype", self.dtype, ("bf16", "fp16", "e4m3"))
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)
        fp8 = self.dtype == "e4m3"
        _check("out_dtype", self.out_dtype, ("bf16", "fp16") if fp8 else (self.dtype,))
        _check("keys", self.keys, ("packed",) if fp8 else ("packed", "pages", "slots"))
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("head_dim", "value_dim"):
            got = getattr(self, name)
            if got % 16 or not 16 <= got <= 256:
                raise ValueError(f"{name}: got {got}, expected a multiple of 16 from 16 to 256")
        if fp8:
            _check("head_dim", self.head_dim, (64, 128, 256))
            _check("value_dim", self.value_dim, (self.head_dim,))

    @property
    def params(self) -> tuple[Path, ...]:
        return (*super().params, self.source.with_name("prefill_params.h"))

    @property
    def name(self) -> str:
        dims = f"d{self.head_dim}" + (
            "" if self.value_dim == self.head_dim else f"v{self.value_dim}"
        )
        out = "" if self.out_dtype == self.dtype else f"-{self.out_dtype}"
        return f"{self.family}-{self.dtype}{out}-{dims}-{self.keys}"

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
            return {64: (96, 3), 128: (128, 2), 256: (64, 2)}[self.head_dim]
        if max(dims) <= 64 and self.keys != "slots":  # whose threads need more registers
            return 96, 3
        if max(dims) <= 128:
            return 128, 2
        if self.head_dim <= 192 and self.value_dim <= 128:
            return 112, 2
        return (96, 2) if max(dims) <= 192 else (64, 2)


@dataclass(frozen=True, kw_only=True)
class GemmSmallM(Variant):
    """W8A8 GEMM for few tokens: streams weights that were repacked at load.

    Args:
        dtype: of x and w, int8 or e4m3.
        out_dtype: of the output and the bias.
        max_m: the largest number of tokens: 8, 16, 32 or 64.
        token_warps: of the 8 warps, how many share the tokens; the others share K.
        row_tiles: tiles of 16 weight rows in one pass over K.
        x_slots: chunks of x that a warp holds in registers.
    """

    family: ClassVar[str] = "gemm_small_m"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "small_m_sm90.cu"

    dtype: str
    out_dtype: str
    max_m: int
    token_warps: int = 1
    row_tiles: int = 2
    x_slots: int = 4

    def __post_init__(self) -> None:
        _check("dtype", self.dtype, OPERAND_DTYPES)
        _check("out_dtype", self.out_dtype, FLOAT_DTYPES)
        _check("max_m", self.max_m, (8, 16, 32, 64))
        _check("token_warps", self.token_warps, (1, 2, 4))

    @property
    def name(self) -> str:
        shape = f"w{self.token_warps}r{self.row_tiles}x{self.x_slots}"
        return f"{self.family}-{self.dtype}-{self.out_dtype}-m{self.max_m}-{shape}"

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_INPUT": {"int8": "Int8", "e4m3": "E4m3"}[self.dtype],
            "OSTINATO_OUTPUT": {"bf16": "__nv_bfloat16", "fp16": "__half", "fp32": "float"}[
                self.out_dtype
            ],
            "OSTINATO_TOKENS": str(self.max_m),
            "OSTINATO_TOKEN_WARPS": str(self.token_warps),
            "OSTINATO_ROW_TILES": str(self.row_tiles),
            "OSTINATO_X_SLOTS": str(self.x_slots),
        }


@dataclass(frozen=True, kw_only=True)
class GemmTiled(Variant):
    """W8A8 GEMM for any number of tokens: TMA, wgmma and a persistent grid.

    Args:
        dtype: of x and w, int8 or e4m3.
        out_dtype: of the output and the bias.
        channels: most channels of a CTA's tile: a multiple of 32 up to 256 where `token_rows`,
            otherwise 64 or 128.
        tokens: most tokens of a tile: 16, 32, 64, 128 or 256.
        pingpong: two warpgroups take turns, one multiplies a tile while the other stores one.
        fast_accum: e4m3 sums stay in the tensor cores; otherwise they are added in fp32 every 128
            products.
    """

    family: ClassVar[str] = "gemm_tiled"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "tiled_sm90.cu"

    dtype: str
    out_dtype: str
    channels: int
    tokens: int
    pingpong: bool = False
    fast_accum: bool = False

    def __post_init__(self) -> None:
        _check("dtype", self.dtype, OPERAND_DTYPES)
        _check("out_dtype", self.out_dtype, FLOAT_DTYPES)
        _check("tokens", self.tokens, (16, 32, 64, 128, 256))
        _check(
            "channels", self.channels, tuple(range(64, 257, 32)) if self.token_rows else (64, 128)
        )
        if self.fast_accum and self.dtype != "e4m3":
            raise ValueError(f"fast_accum: got True with dtype {self.dtype!r}, expected 'e4m3'")

    @property
    def token_rows(self) -> bool:
        """Whether tokens feed the rows of the MMA and channels its columns (csrc: kTokenRows)."""
        return self.tokens in (64, 128) and not self.pingpong

    @property
    def name(self) -> str:
        name = f"{self.family}-{self.dtype}-{self.out_dtype}-{self.channels}x{self.tokens}"
        options = (("pingpong", self.pingpong), ("fast_accum", self.fast_accum))
        return "-".join((name, *(option for option, chosen in options if chosen)))

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_OPERAND": self.dtype,
            "OSTINATO_OUT": self.out_dtype,
            "OSTINATO_CHANNELS": str(self.channels),
            "OSTINATO_TOKENS": str(self.tokens),
            "OSTINATO_PINGPONG": str(int(self.pingpong)),
            "OSTINATO_FAST_ACCUM": str(int(self.fast_accum)),
        }


@dataclass(frozen=True, kw_only=True)
class FusedLinear(Variant):
    """W8A8 linear layer for one token that quantises its activations itself.

    Args:
        kind: per_token (x as it is) or rms_norm (with a residual added before, if given).
        in_dtype: of x, the residual and the norm's weight: bf16 or fp16.
        dtype: of the weight and of x once quantised, int8 or e4m3.
        out_dtype: of the output and the bias.
        max_k: the most input features, 4096 or 8192.
    """

    family: ClassVar[str] = "fused_linear"
    source: ClassVar[Path] = CSRC / "fused_linear" / "fused_linear_sm90.cu"

    kind: str
    in_dtype: str
    dtype: str
    out_dtype: str
    max_k: int

    def __post_init__(self) -> None:
        _check("kind", self.kind, ("per_token", "rms_norm"))
        _check("in_dtype", self.in_dtype, ("bf16", "fp16"))
        _check("dtype", self.dtype, OPERAND_DTYPES)
        _check("out_dtype", self.out_dtype, FLOAT_DTYPES)
        _check("max_k", self.max_k, (4096, 8192))

    @property
    def name(self) -> str:
        dtypes = f"{self.in_dtype}-{self.dtype}-{self.out_dtype}"
        return f"{self.family}-{self.kind}-{dtypes}-k{self.max_k}"

    def defines(self) -> dict[str, str]:
        product = GemmSmallM(dtype=self.dtype, out_dtype=self.out_dtype, max_m=8)
        rows = Quantize(kind=self.kind, in_dtype=self.in_dtype, out_dtype=self.dtype)
        return {**product.defines(), **rows.defines(), "OSTINATO_MAX_K": str(self.max_k)}


@dataclass(frozen=True, kw_only=True)
class AppendKV(Variant):
    """Norm and rotation of q and k, and their way and that of v into the paged cache.

    Args:
        dtype: of q, k and v.
        cache_dtype: of the cache: dtype, int8 or e4m3.
    """

    family: ClassVar[str] = "append_kv"
    source: ClassVar[Path] = CSRC / "attention" / "append.cu"

    dtype: str
    cache_dtype: str = ""

    def __post_init__(self) -> None:
        _check("dtype", self.dtype, FLOAT_DTYPES)
        if not self.cache_dtype:
            object.__setattr__(self, "cache_dtype", self.dtype)
        _check("cache_dtype", self.cache_dtype, (self.dtype, *OPERAND_DTYPES))

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}-{self.cache_dtype}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_DTYPE": self.dtype, "OSTINATO_CACHE_DTYPE": self.cache_dtype}


@dataclass(frozen=True, kw_only=True)
class MergeStates(Variant):
    """Attention to some keys and attention to others, merged.

    Args:
        dtype: of the outputs.
    """

    family: ClassVar[str] = "merge_states"
    source: ClassVar[Path] = CSRC / "merge" / "merge_states.cu"

    dtype: str

    def __post_init__(self) -> None:
        _check("dtype", self.dtype, FLOAT_DTYPES)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_DTYPE": self.dtype}


@dataclass(frozen=True, kw_only=True)
class Sample(Variant):
    """Tokens from logits: greedy, or drawn after temperature, top-k, top-p and min-p.

    Args:
        dtype: of the logits.
    """

    family: ClassVar[str] = "sample"
    source: ClassVar[Path] = CSRC / "sampling" / "sample.cu"

    dtype: str

    def __post_init__(self) -> None:
        _check("dtype", self.dtype, FLOAT_DTYPES)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_DTYPE": self.dtype}


def _check(name: str, got: object, expected: tuple[object, ...]) -> None:
    if got not in expected:
        raise ValueError(f"{name}: got {got!r}, expected {' or '.join(map(repr, expected))}")
