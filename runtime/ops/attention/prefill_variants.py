"""The kernels of prefill attention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar

from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.targets import HOPPER
from ...jit.variant import Variant, check

_WARPGROUP_QUERIES = 64  # csrc: kRows
_PREFILL_TYPES = {"bf16": "__nv_bfloat16", "fp16": "__half", "e4m3": "__nv_fp8_e4m3"}


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
    name_pattern: ClassVar[str] = (
        r"(?P<dtype>\w+)(-(?P<out_dtype>\w+))?-d(?P<head_dim>\d+)(v(?P<value_dim>\d+))?"
        r"-(?P<keys>\w+)(-w(?P<warpgroups>\d+))?"
    )

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
        if max(dims) <= 64 and self.keys != "slots":  # whose threads need more registers
            return 64, 3
        if self.warpgroups == 3:
            return 64, 3
        if max(dims) <= 128:
            return 128, 2
        if self.head_dim <= 192 and self.value_dim <= 128:
            return 112, 2
        return (96, 2) if max(dims) <= 192 else (64, 2)


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
        AttentionPrefill(head_dim=head_dim, dtype="e4m3", out_dtype=out_dtype)
        for head_dim, out_dtype in product((64, 128, 256), ("bf16", "fp16"))
    ),
    *(
        AttentionPrefill(head_dim=128, dtype="e4m3", out_dtype=out_dtype, warpgroups=3)
        for out_dtype in ("bf16", "fp16")
    ),
)
register_family(AttentionPrefill, _LISTED)
