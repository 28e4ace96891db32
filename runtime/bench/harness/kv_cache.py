"""Random paged caches in 16 or 8 bits, and what their pages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...ops.common.e4m3 import as_bytes, to_float32

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Values are about normal, whatever their codes.
_SCALES = {"fp8": 0.5, "int8": 1 / 40}
_SCALE_BYTES = 4  # of a token and head
_ELEMENTS = 2**26  # of a cache, that are in fp32 at a time


@dataclass(frozen=True)
class KVLayout:
    """How a cache stores numbers.

    Args:
        dtype: one of `KV_DTYPES`.
        scales: of 8 bits: "static", one for all keys and one for all values, or one per "token" and
            head.
    """

    dtype: str = "bf16"
    scales: str = "static"

    def head_bytes(self, dim: int) -> int:
        """Return the bytes of one token's head of keys, or of values."""
        per_token = self.dtype in _SCALES and self.scales == "token"
        return dim * KV_DTYPES[self.dtype].itemsize + (_SCALE_BYTES if per_token else 0)


def random_cache(
    shape: Sequence[int],
    layout: KVLayout,
    ends: Sequence[tuple[int, int]],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys or values in pages, and their scales, as `ops.paged_attention` takes them.

    Args:
        shape: [pages, page, heads, dim].
        layout: how numbers are stored.
        ends: pages and their first slot that is in no use: from there on there is NaN, or -128.
        device: where they shall lie.
    """
    cache = torch.empty(tuple(shape), dtype=KV_DTYPES[layout.dtype], device=device)
    value = _SCALES.get(layout.dtype)
    for pages in cache.split(max(1, _ELEMENTS // cache[0].numel())):
        numbers = torch.randn(pages.shape, device=device) / (value or 1.0)
        pages.copy_(numbers.round_().clamp_(-127, 127) if layout.dtype == "int8" else numbers)
    scale = None
    if value is not None:
        scale = torch.tensor(value, device=device)
    if value is not None and layout.scales == "token":
        scale = value * (0.75 + torch.rand(tuple(shape[:3]), device=device) / 2)
    for page, end in ends:
        cache[page, end:] = -128 if layout.dtype == "int8" else torch.nan
        if scale is not None and scale.ndim:
            scale[page, end:] = torch.nan
    return cache, scale


def numbers_of(
    cache: torch.Tensor, scale: torch.Tensor | None, pages: torch.Tensor
) -> torch.Tensor:
    """Return the numbers of pages [n], one after the other: [n * page, heads, dim] fp32."""
    numbers = to_float32(as_bytes(cache)[pages].view(cache.dtype))
    if scale is not None:
        numbers = numbers * (scale[pages].unsqueeze(-1) if scale.ndim else scale)
    return numbers.flatten(0, 1)
