"""Sizes for which there is no memory are refused by name, before any memory is taken."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine import cache_size
from ostinato.engine.cache_size import check_room

_CPU = torch.device("cpu")


@given(count=st.integers(0, 10**18), each=st.integers(1, 10**9), free=st.integers(0, 10**12))
def test_what_fits_is_what_the_error_says(count: int, each: int, free: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_size, "available_memory", lambda: free)
        if count * each <= free:
            check_room("num_pages", count, each, _CPU)
            return
        with pytest.raises(ValueError, match=rf"num_pages: got {count}, expected at most") as said:
            check_room("num_pages", count, each, _CPU)
        fits = int(re.findall(r"at most (\d+):", str(said.value))[0])
        assert fits < count
        check_room("num_pages", fits, each, _CPU)
        with pytest.raises(ValueError, match="num_pages"):
            check_room("num_pages", fits + 1, each, _CPU)


@pytest.mark.gpu
def test_a_gpus_memory_counts_with_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    device, size = torch.device("cuda", 0), 1 << 30
    with pytest.raises(ValueError, match=r"num_pages: got 1, expected at most 0: .* on cuda:0"):
        check_room("num_pages", 1, 1 << 40, device)
    torch.cuda.empty_cache()
    kept = torch.empty(size, dtype=torch.uint8, device=device)
    del kept  # torch keeps its memory, which another tensor may take
    # Another process may take what is free at any time.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, 1 << 40))
    check_room("num_pages", 1, size, device)
    with pytest.raises(ValueError, match=r"num_pages: got 1, expected at most 0: .* on cuda:0"):
        check_room("num_pages", 1, 1 << 40, device)
