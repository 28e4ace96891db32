"""What `flash_attn_with_kvcache` makes of pages and places that a cache does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ostinato.compat.flash_attn import flash_attn_with_kvcache

CPU = torch.device("cpu")


def randn(device: torch.device, *shape: int) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(*shape, device=device, dtype=dtype)


def int32(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("pages", [False, True])
def test_tokens_with_room_attend_as_if_all_had_it(pages: bool, device: torch.device) -> None:
    q, k, v = (randn(device, 2, 6, 2, 64) for _ in "qkv")
    caches = [randn(device, 6, 4, 2, 64) if pages else randn(device, 2, 8, 2, 64) for _ in "kv"]
    options: dict[str, Any] = {"causal": True}
    if pages:
        options["block_table"] = int32([[4, 1], [0, 5]], device)
    lengths = int32([5, 2], device)
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, **options)
    some = flash_attn_with_kvcache(q[:, :3], *caches, cache_seqlens=lengths + 3, **options)
    torch.testing.assert_close(out[:, :3], some)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_table": [[0, 0], [-1, 1]], "lengths": [3, 9]}, "block_table: got -1, expected 0"),
        ({"block_table": [[0], [-1]], "lengths": [3, 7]}, "block_table: got -1, expected 0 to 2"),
        ({"block_table": [[0], [7]], "lengths": [3, 0]}, "block_table: got 7, expected 0 to 2"),
        ({"block_table": [[1], [1]], "lengths": [3, 3]}, "block_table: got 1 for two tokens"),
        ({"cache_batch_idx": [1, -1], "lengths": [3, 7]}, "cache_batch_idx: got -1, expected 0"),
        ({"cache_batch_idx": [1, 1], "lengths": [3, 3]}, "cache_batch_idx: got 1 for two tokens"),
    ],
    ids=str,
)
def test_pages_that_are_not_there_are_told(change: dict[str, Any], words: str) -> None:
    caches = [torch.zeros(3, 8, 2, 16) for _ in "kv"]
    q, new = torch.randn(2, 1, 2, 16), torch.ones(2, 1, 2, 16)
    lengths = int32(change.pop("lengths"), CPU)
    tables = {name: int32(rows, CPU) for name, rows in change.items()}
    with pytest.raises(ValueError, match=words):
        flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lengths, **tables)
    assert not any(cache.any() for cache in caches)


def test_a_table_without_pages_is_told() -> None:
    cache, new = torch.zeros(3, 8, 2, 16), torch.ones(2, 1, 2, 16)
    options = {"cache_seqlens": 0, "block_table": torch.zeros(2, 0, dtype=torch.int32)}
    with pytest.raises(ValueError, match="block_table: got no page, expected one or more"):
        flash_attn_with_kvcache(new[:, :0], cache, cache.clone(), new, new, **options)


def test_pages_behind_a_window_may_be_gone() -> None:
    caches = [torch.randn(3, 8, 2, 16) for _ in "kv"]
    q, new = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16)
    given = {"cache_seqlens": 17, "causal": True, "window_size": (6, 0)}
    out = flash_attn_with_kvcache(
        q, *caches, new, new, block_table=int32([[-1, 0, 2]], CPU), **given
    )
    same = flash_attn_with_kvcache(q, *caches, block_table=int32([[1, 0, 2]], CPU), **given)
    assert not out.isnan().any()
    assert not torch.equal(out, same)  # one key less
    given["cache_seqlens"] = 18
    again = flash_attn_with_kvcache(q, *caches, block_table=int32([[1, 0, 2]], CPU), **given)
    assert torch.equal(out, again)


@pytest.mark.gpu
def test_pages_that_are_not_there_are_not_written() -> None:
    device = torch.device("cuda")
    caches = [torch.zeros(3, 16, 2, 64, device=device, dtype=torch.bfloat16) for _ in "kv"]
    q, new = (torch.ones(3, 1, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = int32([[0], [-1], [9]], device)
    flash_attn_with_kvcache(
        q, *caches, new, new, cache_seqlens=int32([3, 15, 0], device), block_table=table
    )
    for cache in caches:
        assert cache.sum() == cache[0, 3].sum() == 2 * 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rotary_cos": torch.zeros(5, 5)}, "rotary_cos: got 5 angles of a position, expected 1"),
        ({"rotary_cos": torch.zeros(5, 0)}, "rotary_cos: got 0 angles of a position"),
        ({"rotary_interleaved": 1}, "rotary_interleaved: got int, expected a bool"),
        ({"cache_seqlens": 2**31}, "cache_seqlens: got 2147483648, expected an int32"),
        ({"q": torch.zeros(2, 1, 4, 8, dtype=torch.int8)}, "q: got dtype torch.int8, expected bf"),
    ],
    ids=str,
)
def test_errors_name_arguments_of_flash_attn(change: dict[str, Any], words: str) -> None:
    new = {name: torch.ones(2, 1, 2, 8) for name in "kv"}
    caches = {f"{name}_cache": torch.zeros(2, 5, 2, 8) for name in "kv"}
    if (cos := change.get("rotary_cos")) is not None:
        change = {**change, "rotary_sin": cos}
    given = {"q": torch.zeros(2, 1, 4, 8), **caches, **new, "cache_seqlens": 2, **change}
    with pytest.raises((TypeError, ValueError), match=words):
        flash_attn_with_kvcache(**given)


def test_lengths_before_the_start_have_angles() -> None:
    angles = torch.rand(8, 4)
    options = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True}
    q, k, v = (torch.randn(1, 5, 2, 16) for _ in "qkv")
    caches = [torch.zeros(1, 8, 2, 16) for _ in "kv"]
    flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=int32([-3], CPU), **options)
    assert caches[0][0].flatten(1).any(-1).tolist() == [True, True, *[False] * 6]


def test_a_most_of_no_rows_is_one_row() -> None:
    """As of `flash_attn_varlen_func`; nothing of it is what was in memory."""
    cache = torch.randn(2, 8, 2, 16)
    given = {"cache_seqlens": 5, "cu_seqlens_q": int32([0, 1, 2], CPU)}
    q = torch.randn(2, 2, 16)
    out = flash_attn_with_kvcache(q, cache, cache, max_seqlen_q=0, **given)
    assert torch.equal(out, flash_attn_with_kvcache(q, cache, cache, max_seqlen_q=1, **given))
