"""The calls that nano-vllm makes of flash-attn, and the whole engine where a clone of it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

CLONE = os.environ.get("OSTINATO_NANO_VLLM", "")
PAGE, HEADS, KV_HEADS, DIM = 256, 4, 2, 64
SCALE = DIM**-0.5


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of the last queries [T, heads, dim] to all keys, in fp64."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    at = torch.arange(k.size(0) - q.size(0), k.size(0), device=q.device)[:, None]
    hidden = torch.arange(k.size(0), device=q.device) > at
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(2), v)


def starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device)
    return ends.cumsum(0, dtype=torch.int32)


def check(out: torch.Tensor, want: list[torch.Tensor]) -> None:
    torch.testing.assert_close(out.double(), torch.cat(want), rtol=0.02, atol=0.02)


def test_a_prompt_behind_a_prefix_and_a_step(device: torch.device) -> None:
    """The three calls, by nano-vllm's keywords: its pages hold 256 tokens."""
    lengths, cached = [300, 40], [256, 0]
    table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32, device=device)
    k, v = (
        [torch.randn(n + 1, KV_HEADS, DIM).to(device, torch.bfloat16) for n in lengths]
        for _ in range(2)
    )
    caches = [torch.full((4, PAGE, KV_HEADS, DIM), torch.nan).to(k[0]) for _ in range(2)]
    for cache, kept in zip(caches, (k, v), strict=True):
        for row, tokens in enumerate(kept):
            for at, part in enumerate(tokens.split(PAGE)):
                cache[table[row, at], : len(part)] = part

    def queries(counts: list[int]) -> torch.Tensor:
        return torch.randn(sum(counts), HEADS, DIM).to(device, torch.bfloat16)

    # A prompt, whose keys and values are packed.
    q = queries(lengths)
    packed = [torch.cat([x[:n] for x, n in zip(kept, lengths, strict=True)]) for kept in (k, v)]
    common: dict[str, Any] = {"softmax_scale": SCALE, "causal": True}
    out = flash_attn_varlen_func(
        *(q, *packed),
        max_seqlen_q=max(lengths),
        cu_seqlens_q=starts(lengths, device),
        max_seqlen_k=max(lengths),
        cu_seqlens_k=starts(lengths, device),
        block_table=None,
        **common,
    )
    each = list(zip(q.split(lengths), k, v, lengths, strict=True))
    check(out, [attended(x, keys[:n], values[:n]) for x, keys, values, n in each])

    # What is left of the prompts behind cached prefixes, whose keys lie in pages.
    new = [n - c for n, c in zip(lengths, cached, strict=True)]
    q = queries(new)
    out = flash_attn_varlen_func(
        *(q, *caches),
        max_seqlen_q=max(new),
        cu_seqlens_q=starts(new, device),
        max_seqlen_k=max(lengths),
        cu_seqlens_k=starts(lengths, device),
        block_table=table,
        **common,
    )
    each = list(zip(q.split(new), k, v, lengths, strict=True))
    check(out, [attended(x, keys[:n], values[:n]) for x, keys, values, n in each])

    # A decode step.
    q = queries([1, 1])
    out = flash_attn_with_kvcache(
        q.unsqueeze(1),
        *caches,
        cache_seqlens=torch.tensor([n + 1 for n in lengths], dtype=torch.int32, device=device),
        block_table=table,
        **common,
    )
    check(out[:, 0], [attended(x, *kv) for x, *kv in zip(q.split(1), k, v, strict=True)])


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not CLONE, reason="OSTINATO_NANO_VLLM: got nothing, expected a clone")
def test_the_engine_gives_the_same_tokens_with_graphs() -> None:
    script = Path(__file__).with_name("run_nano_vllm.py")
    done = subprocess.run(
        [sys.executable, str(script), CLONE], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "tokens with graphs before the first that eager has not: 48" in done.stdout
