"""What the host prepares for a decode step."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.engine.decode_step import _PageRows
from ostinato.models import PagedKVCache
from tiny import tiny_llama

SEQUENCES, PAGES = 256, 300


@pytest.fixture(scope="module")
def cache() -> PagedKVCache:
    config = tiny_llama("cpu").config
    cache = PagedKVCache.for_model(
        config, num_pages=1 + SEQUENCES * 12, page_size=4, device=torch.device("cpu")
    )
    for sequence in range(SEQUENCES):
        cache.add(sequence)
        cache.reserve(sequence, 1 + sequence % 45)
    return cache


def _requests(order: torch.Tensor) -> list[Any]:
    return [SimpleNamespace(id=255 - slot, slot=slot) for slot in order.tolist()]


def test_rows_are_the_pages_of_the_requests_in_their_order(cache: PagedKVCache) -> None:
    order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(0))[:200]
    requests = _requests(order)
    rows = _PageRows(cache, SEQUENCES, PAGES).rows(requests, order)
    expected = cache.page_table([request.id for request in requests], PAGES)
    assert torch.equal(rows, expected)
    assert rows.dtype == torch.int32


def test_rows_take_one_thread(cache: PagedKVCache) -> None:
    """Threads that torch wakes for some microseconds spin for milliseconds, on every core."""
    order = torch.arange(SEQUENCES)
    requests, pages = _requests(order), _PageRows(cache, SEQUENCES, PAGES)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        time.sleep(0.3)  # those of other tests have come to rest
        own, all_threads = time.thread_time(), time.process_time()
        for _ in range(200):
            pages.rows(requests, order)
        own, all_threads = time.thread_time() - own, time.process_time() - all_threads
    finally:
        torch.set_num_threads(threads)
    assert all_threads < 1.2 * own + 0.005
