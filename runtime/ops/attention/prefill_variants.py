"""The kernels of prefill attention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.targets import HOPPER
from ...jit.variant import OPERAND_DTYPES, Variant, check

_PREFILL_TYPES = {"bf16": "__nv_bfloat16", "fp16": "__half", "e4m3": "__nv_fp8_e4m3"}
_DIMS_8_BIT = (64, 128, 256)
_WARPGROUP_QUERIES = 64  # csrc: kRows


@dataclass(frozen=True, kw_only=True)
class AttentionPrefill(Variant):
    """Attention of many queries per sequence: TMA, wgmma and a persistent grid.

    Args:
        head_dim: a multiple of 16 up to 256; of e4m3 64, 128 or 256.
        dtype: of queries, keys and values: bf16, fp16 or e4m3.
        kv_dtype: of keys and values: `dtype`; or int8 or e4m3 beside 16-bit queries, which threads
            read from packed keys or slots and dequantise, with head dims of 64, 128 or 256.
        token_scales: 8-bit keys and values have scales of each token; else of each head, or one.
        out_dtype: of the output, bf16 or fp16: `dtype` unless that is e4m3.
        keys: where they and values lie: `packed`, one sequence after the other; `pages` of a
            multiple of 16 tokens, copied by TMA; `slots` of pages of any size, gathered by threads.
        value_dim: of values and the output, a multiple of 16 up to `widest_values`; `head_dim`
            unless told, and always of e4m3.
        warpgroups: that multiply, each 64 queries: 3 with head dims of 128, but for 16-bit keys in
            slots and for scales of tokens, which is faster where tiles are many; 0 for the usual
            number.
    """

    family: ClassVar[str] = "attention_prefill"
    source: ClassVar[Path] = CSRC / "attention" / "prefill" / "prefill_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})
    name_pattern: ClassVar[str] = (
        r"(?P<dtype>\w+)(-(?P<kv_dtype>\w+)_kv)?(?P<token_scales>-token_scales)?(-(?P<out_dtype>\w+))?"
        r"-d(?P<head_dim>\d+)(v(?P<value_dim>\d+))?"
        r"-(?P<keys>\w+)(-w(?P<warpgroups>\d+))?"
    )

    head_dim: int
    dtype: str
    kv_dtype: str = ""
    token_scales: bool = False
    out_dtype: str = ""
    keys: str = "packed"
    value_dim: int = 0
    warpgroups: int = 0

    def __post_init__(self) -> None:
        check("dtype", self.dtype, ("bf16", "fp16", "e4m3"))
        for name in ("kv_dtype", "out_dtype"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.dtype)
        fp8, dequantizes = self.dtype == "e4m3", self.kv_dtype != self.dtype
        check("kv_dtype", self.kv_dtype, ("e4m3",) if fp8 else (self.dtype, *OPERAND_DTYPES))
        check("out_dtype", self.out_dtype, ("bf16", "fp16") if fp8 else (self.dtype,))
        check("token_scales", self.token_scales, (False, True) if dequantizes else (False,))
        served = ("packed", "slots") if dequantizes else ("packed", "pages", "slots")
        check("keys", self.keys, ("packed",) if fp8 else served)
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
        if fp8 or dequantizes:
            check("head_dim", self.head_dim, _DIMS_8_BIT)
            check("value_dim", self.value_dim, (self.head_dim,))
        gathers = self.keys == "slots" and not dequantizes
        some_are_wide = (
            not gathers and not self.token_scales and self.head_dim == self.value_dim == 128
        )
        check("warpgroups", self.warpgroups, (0, 3) if some_are_wide else (0,))

    @staticmethod
    def widest_values(head_dim: int) -> int:
        """Return the largest `value_dim` for which shared memory has room.

        Outputs larger than their queries need a place of their own beside these and the rings.
        """
        return 192 if 128 < head_dim <= 192 else 256

    @property
    def name(self) -> str:
        dims = f"d{self.head_dim}" + (
            "" if self.value_dim == self.head_dim else f"v{self.value_dim}"
        )
        cache = "" if self.kv_dtype == self.dtype else f"-{self.kv_dtype}_kv"
        cache += "-token_scales" if self.token_scales else ""
        out = "" if self.out_dtype == self.dtype else f"-{self.out_dtype}"
        wide = f"-w{self.warpgroups}" if self.warpgroups else ""
        return f"{self.family}-{self.dtype}{cache}{out}-{dims}-{self.keys}{wide}"

    @staticmethod
    def fields_of(groups: dict[str, Any]) -> dict[str, Any]:
        token_scales = groups.pop("token_scales", None)
        return groups if token_scales is None else {**groups, "token_scales": True}

    def defines(self) -> dict[str, str]:
        tile_keys, warpgroups = self._tile()
        return {
            "OSTINATO_HEAD_DIM": str(self.head_dim),
            "OSTINATO_VALUE_DIM": str(self.value_dim),
            "OSTINATO_TYPE": _PREFILL_TYPES[self.operands],
            "OSTINATO_QUERY": _PREFILL_TYPES[self.dtype],
            "OSTINATO_CACHE": (
                "Same" if self.kv_dtype == self.dtype else self.kv_dtype.capitalize()
            ),
            "OSTINATO_TOKEN_SCALES": str(int(self.token_scales)),
            "OSTINATO_OUT": _PREFILL_TYPES[self.out_dtype],
            "OSTINATO_BYTES": str(int(self.dtype == "e4m3")),
            "OSTINATO_KEYS": str(tile_keys),
            "OSTINATO_CONSUMERS": str(warpgroups),
            "OSTINATO_SOURCE": {"packed": "Packed", "pages": "Pages", "slots": "Slots"}[self.keys],
        }

    @property
    def operands(self) -> str:
        """What is multiplied: 8 bits become fp16 sooner than bf16."""
        return self.dtype if self.kv_dtype == self.dtype else "fp16"

    @property
    def tile_queries(self) -> int:
        """Queries of one head that a work tile has at most."""
        return _WARPGROUP_QUERIES * self._tile()[1]

    def _tile(self) -> tuple[int, int]:
        """Return the keys of a tile and the warpgroups that multiply.

        Two stages of keys and values must fit in shared memory beside the queries, and scores,
        weights and outputs in the registers.
        """
        dims = (self.head_dim, self.value_dim)
        if self.dtype == "e4m3":
            wide = self.head_dim == 64 or self.warpgroups == 3
            return (96, 3) if wide else {128: (128, 2), 256: (96, 2)}[self.head_dim]
        gathers = self.keys == "slots" and self.kv_dtype == self.dtype
        if max(dims) <= 64 and not gathers:  # whose threads need more registers
            return 64, 3
        if self.warpgroups == 3:
            return 64, 3
        if max(dims) <= 128:
            return 128, 2
        if self.head_dim <= 192 and self.value_dim <= 128:
            return 112, 2
        return (96, 2) if max(dims) <= 192 else (64, 2)


def _ways_8_bit(head_dim: int) -> list[dict[str, Any]]:
    """Return what an 8-bit cache of a head dim has kernels for."""
    return [{}, {"token_scales": True}, *([{"warpgroups": 3}] if head_dim == 128 else [])]


_LISTED = (
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
        AttentionPrefill(head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, keys="slots", **how)
        for dtype, kv_dtype, head_dim in product(("bf16", "fp16"), OPERAND_DTYPES, _DIMS_8_BIT)
        for how in _ways_8_bit(head_dim)
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
register_family(AttentionPrefill, _LISTED)
