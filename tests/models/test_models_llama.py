"""The decoder over its cache: however a sequence is cut into calls, the logits are the same."""

from __future__ import annotations

import pytest
import torch

from ostinato.models import AttentionInputs, KVFormat, PagedKVCache, sequence_logits
from ostinato.models.families.llama import Llama
from tiny import CONFIG, tiny_llama

TOKENS = [3, 250, 17, 99, 4, 4, 180, 31, 7, 66, 200, 1, 90, 12, 55, 43, 21, 8, 128, 77, 5]
SCHEMES = ("plain", "int8", "fp8")


def run_in_pieces(
    model: Llama,
    sequences: list[list[int]],
    pieces: list[int],
    cache_format: KVFormat | None = None,
) -> torch.Tensor:
    """Feed all sequences side by side, in calls of the given numbers of tokens each."""
    device = model.device
    cache = PagedKVCache.for_model(
        model.config, num_pages=40, page_size=4, device=device, kv_format=cache_format
    )
    ids = list(range(len(sequences)))
    for sequence in ids:
        cache.add(sequence)
    collected: list[list[torch.Tensor]] = [[] for _ in sequences]
    start = 0
    for count in pieces:
        stop = start + count
        for sequence in ids:
            cache.reserve(sequence, stop)
        slots = [slot for sequence in ids for slot in cache.slots(sequence, start, stop)]
        lens = torch.full((len(ids),), stop, dtype=torch.int32, device=device)
        attention = AttentionInputs(
            slot_mapping=torch.tensor(slots, device=device),
            page_table=cache.page_table(ids, 8).to(device),
            seq_lens=lens,
            max_seqlen_q=count,
        )
        tokens = [token for sequence in sequences for token in sequence[start:stop]]
        positions = torch.arange(start, stop, dtype=torch.int32, device=device)
        logits = model(
            torch.tensor(tokens, device=device), positions.repeat(len(ids)), attention, cache
        )
        for sequence, rows in enumerate(logits.split(count)):
            collected[sequence].append(rows)
        start = stop
    return torch.stack([torch.cat(rows) for rows in collected])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("pieces", [[21], [1] * 21, [8, 8, 5], [1, 19, 1]], ids=str)
def test_a_sequence_may_be_cut_anywhere(
    scheme: str, pieces: list[int], device: torch.device
) -> None:
    model = tiny_llama(device, scheme)
    expected = sequence_logits(model, TOKENS)
    torch.testing.assert_close(
        run_in_pieces(model, [TOKENS], pieces)[0], expected, atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_neighbours_change_no_bit(scheme: str, device: torch.device) -> None:
    model = tiny_llama(device, scheme)
    sequences = [TOKENS, TOKENS[::-1], [7] * 21]
    pieces = [9, 1, 1, 10]
    together = run_in_pieces(model, sequences, pieces)
    for sequence, rows in zip(sequences, together, strict=True):
        assert torch.equal(run_in_pieces(model, [sequence], pieces)[0], rows)


def test_sliding_window_hides_older_tokens_in_its_layers_only(device: torch.device) -> None:
    windowed = tiny_llama(device, sliding_windows=(4, 4))
    # Two layers of window 4 reach back 3 + 3 tokens.
    changed = [(t + 1) % 256 if at < 14 else t for at, t in enumerate(TOKENS)]
    logits = [sequence_logits(windowed, tokens)[-1] for tokens in (TOKENS, changed)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    mixed = tiny_llama(device, sliding_windows=(4, None))
    logits = [sequence_logits(mixed, tokens)[-1] for tokens in (TOKENS, changed)]
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_logits_of_chosen_rows_are_those_of_all_rows(device: torch.device) -> None:
    model = tiny_llama(device, "int8")
    cache = PagedKVCache.for_model(model.config, num_pages=9, page_size=4, device=device)
    cache.add(0)
    cache.reserve(0, 21)
    attention = AttentionInputs(
        slot_mapping=torch.tensor(cache.slots(0, 0, 21), device=device),
        page_table=cache.page_table([0], 8).to(device),
        seq_lens=torch.tensor([21], dtype=torch.int32, device=device),
        max_seqlen_q=21,
    )
    for rows in ([20], [0, 5, 5], []):
        chosen = torch.tensor(rows, dtype=torch.int64, device=device)
        x, residual = model.hidden(
            torch.tensor(TOKENS, device=device),
            torch.arange(21, dtype=torch.int32, device=device),
            attention,
            cache,
        )
        logits = model.logits(x[chosen], residual[chosen])
        assert torch.equal(logits, sequence_logits(model, TOKENS)[chosen])


def test_every_tensor_is_named_once() -> None:
    model = tiny_llama(scheme="int8", qk_norm=True)
    tensors = list(model.tensors())
    assert len({t.data_ptr() for t in tensors}) == len(tensors)
    # Embedding, final norm, RoPE table and head; per layer 4 norms, 4 weights and 4 scales.
    assert len(tensors) == 4 + CONFIG.num_layers * 12
    tied = Llama(
        model.config, model.embedding, [], model.norm, type(model.lm_head)(model.embedding)
    )
    assert len(list(tied.tensors())) == 3


@pytest.mark.parametrize("context", [-1, 0, 129])
def test_a_context_beyond_the_trained_positions_is_refused(context: int) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=f"max_context: got {context}, expected 1 to .* = 128"):
        Llama(
            model.config,
            model.embedding,
            model.layers,
            model.norm,
            model.lm_head,
            max_context=context,
        )


@pytest.mark.parametrize("count", [0, 129])
def test_scoring_no_tokens_or_too_many_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"tokens: got {count}, expected 1 to 128"):
        sequence_logits(tiny_llama(), [0] * count)
