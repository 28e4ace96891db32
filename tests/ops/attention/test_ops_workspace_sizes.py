"""How many bytes a caller's own workspace of attention must have."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ostinato import ops
from ostinato.jit.variant import Variant
from ostinato.ops.attention import decode_cuda, prefill_cuda, workspace

BF16 = (torch.bfloat16, 64)
OF_8_BITS = {"kv_dtype": torch.int8, "heads_kv": 2}
SIZES = {"max_batch": 64, "max_pages": 512, "page_size": 16}


class Library:
    """Wants the more the more columns its kernel has, and one of larger tiles the most."""

    def __init__(self, kernel: Variant) -> None:
        self._kernel = kernel

    def workspace_bytes(self, **capacities: int) -> int:
        if not capacities:
            return 8 + 1000 * self._kernel.warpgroups
        asked.append((self._kernel.columns, capacities))
        return 10 * self._kernel.columns + capacities["sequences"]


asked: list[tuple[int, dict[str, int]]] = []


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    monkeypatch.setattr(workspace, "runs", lambda family, device: True)
    monkeypatch.setattr(workspace, "device_index", lambda device: 0)
    for module in (decode_cuda, prefill_cuda):
        for name, value in {
            "on_device": lambda device: nullcontext(),
            "current_stream": lambda device: 0,
            "load": lambda kernel, *, device, stream: Library(kernel),
        }.items():
            monkeypatch.setattr(module, name, value)


def test_elsewhere_none_is_used() -> None:
    assert ops.paged_attention_workspace(torch.bfloat16, 8, 2, 128, **SIZES, device="cpu") == 0
    assert ops.varlen_attention_workspace(torch.bfloat16, 128, device="cpu") == 0


@pytest.mark.parametrize("queries", [1, 3, 16])
def test_of_steps_it_suffices_for_fewer_queries(queries: int) -> None:
    found = ops.paged_attention_workspace(torch.bfloat16, 8, 2, 64, **SIZES, max_seqlen_q=queries)
    columns = {1: {8}, 3: {8, 16}, 16: {8, 16, 32, 64}}[queries]
    assert {asked_of for asked_of, _ in asked} == columns
    assert found == 10 * max(columns) + 64 * 2
    assert {capacities["tokens"] for _, capacities in asked} == {512 * 16}


def test_of_prompts_it_suffices_for_both_tiles() -> None:
    assert ops.varlen_attention_workspace(torch.bfloat16, 128) == 3008
    assert ops.varlen_attention_workspace(torch.bfloat16, 64) == 8
    assert ops.varlen_attention_workspace(torch.float8_e4m3fn, 256) == 8
    assert ops.varlen_attention_workspace(torch.float32, 64) == 0


def test_what_is_dequantised_has_room_behind_the_rest() -> None:
    row = 2 * 2 * 64 * 2  # keys and values, bytes, dim, heads
    for few, many in (
        [ops.varlen_attention_workspace(*BF16, **OF_8_BITS, max_tokens_k=n) for n in (512, 1024)],
        [
            ops.paged_attention_workspace(
                *(torch.bfloat16, 8, 2, 64),
                **{**SIZES, "max_seqlen_q": 5, "max_tokens_k": n},
                kv_dtype=torch.int8,
            )
            for n in (512, 1024)
        ],
    ):
        assert many - few == 512 * row
    plain = ops.paged_attention_workspace(torch.bfloat16, 8, 2, 64, **SIZES, max_seqlen_q=5)
    every = {**SIZES, "max_seqlen_q": 5, "kv_dtype": torch.int8}
    tokens = 64 * 512 * 16
    found = ops.paged_attention_workspace(torch.bfloat16, 8, 2, 64, **every)
    assert tokens * row < found - plain < tokens * row + 16384
    steps = ops.paged_attention_workspace(torch.bfloat16, 8, 2, 64, **SIZES, kv_dtype=torch.int8)
    assert steps < 16384


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": torch.int8}, TypeError, "dtype: got torch.int8"),
        ({"kv_dtype": torch.float32}, TypeError, "kv_dtype: got torch.float32"),
        ({"heads_q": 7}, ValueError, "heads_q: got 7, expected a multiple of heads_kv = 2"),
        ({"max_batch": 0}, ValueError, "max_batch: got 0"),
        ({"max_tokens_k": -1}, ValueError, "max_tokens_k: got -1, expected at least 0"),
        ({"page_size": 1.5}, TypeError, "page_size: got float"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant: got int"),
    ],
)
def test_bad_capacities(change: dict[str, Any], error: type[Exception], message: str) -> None:
    sizes = {"dtype": torch.bfloat16, "heads_q": 8, "heads_kv": 2, "head_dim": 128, **SIZES}
    with pytest.raises(error, match=message):
        ops.paged_attention_workspace(**{**sizes, **change})
