"""Attention to equal keys is their value, exactly, however many there are and in whatever dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import ops

pytestmark = pytest.mark.usefixtures("kernels")

PAGE, HEADS, GROUP, DIM = 16, 2, 4, 64
LENGTHS = [1, 2, 3, 1000, 4097, pytest.param(131072, marks=pytest.mark.gpu)]
CACHES: dict[str, tuple[torch.dtype, str | None]] = {
    "16 bits": (torch.bfloat16, None),
    "fp8_static": (torch.float8_e4m3fn, "static"),
    "fp8": (torch.float8_e4m3fn, "token"),
    "int8_static": (torch.int8, "static"),
    "int8": (torch.int8, "token"),
}


def cache_of(
    value: float, length: int, kind: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return pages of this number, NaN behind the end, and scales: powers of two."""
    dtype, scales = CACHES[kind]
    pages = -(-length // PAGE) + 1
    scale = None if scales is None else 0.25
    cache = torch.full((pages * PAGE, HEADS, DIM), value / (scale or 1.0), device=device)
    cache[length:] = -128 if dtype is torch.int8 else torch.nan
    pages_of = cache.to(dtype).view(pages, PAGE, HEADS, DIM)
    if scale is None:
        return pages_of, None
    if scales == "static":
        return pages_of, torch.tensor(scale, device=device)
    each = torch.full((pages * PAGE, HEADS), scale, device=device)
    each[length:] = torch.nan
    return pages_of, each.view(pages, PAGE, HEADS)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("length", LENGTHS)
def test_n_equal_keys_give_their_value(
    length: int, kind: str, batch_invariant: bool, queries: int, device: torch.device
) -> None:
    if length > 10_000 and device.type == "cpu":
        pytest.skip("takes long on a CPU")
    value, count = 1.25, min(queries, length)
    keys, k_scale = cache_of(-3.0, length, kind, device)
    values, v_scale = cache_of(value, length, kind, device)
    table = torch.arange(keys.size(0), device=device, dtype=torch.int32)[None]
    lengths = torch.tensor([length], device=device, dtype=torch.int32)
    q = torch.full((count, HEADS * GROUP, DIM), 0.5, device=device, dtype=torch.bfloat16)
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if queries > 1:
        options["cu_seqlens_q"] = torch.tensor([0, count], device=device, dtype=torch.int32)
        options["max_seqlen_q"] = count
    out = ops.paged_attention(
        q, keys, values, table, lengths, batch_invariant=batch_invariant, **options
    )
    assert isinstance(out, torch.Tensor)
    assert (out.float() == value).all()
