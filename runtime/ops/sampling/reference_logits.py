"""Readable twins of `process_logits` and `token_logprobs`, one row and token at a time."""

from __future__ import annotations

import math

import torch

from .process_logits import LogitsTables
from .token_logprobs import RowLogprobs


def process_logits(
    logits: torch.Tensor,
    tables: LogitsTables,
    *,
    slots: torch.Tensor,
    counters: torch.Tensor,
    tokens: torch.Tensor,
    repetition_penalty: torch.Tensor,
    seen: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return logits to sample from; the history is left as it is."""
    out = logits.to(dtype, copy=True)
    for b, slot in enumerate(slots.tolist()):
        counter, size = int(counters[b]), tables.history.size(1)
        frequency, presence = tables.frequency[slot].to(dtype), tables.presence[slot].to(dtype)
        generated = tables.history[slot].tolist()[: min(counter, size)]
        if generated:
            generated[-1] = int(tokens[b])
        penalty = repetition_penalty[b].to(dtype)
        additions: dict[int, float] = {}
        for i in range(int(tables.edits[slot])):
            if counter < int(tables.edit_ends[slot, i]):
                token = int(tables.edit_ids[slot, i])
                additions[token] = additions.get(token, 0.0) + float(tables.edit_values[slot, i])
        for token in range(logits.size(1)):
            logit = out[b, token]
            if logit.isnan():
                continue
            word = int(tables.mask[slot, token // 32])
            if tables.masked[slot] and not word >> token % 32 & 1:
                logit = torch.full_like(logit, -math.inf)
            addition = additions.get(token, 0.0)
            if addition == -math.inf:
                logit = torch.full_like(logit, -math.inf)
            elif addition != 0:
                logit = logit + addition
            if seen[slot, token] and penalty != 1:
                logit = logit / penalty if logit > 0 else logit * penalty
            times = generated.count(token)
            if times and (frequency != 0 or presence != 0):
                logit = logit - frequency * times - presence
            out[b, token] = logit
    return out


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    wanted: torch.Tensor,
    slots: torch.Tensor,
    most: int,
    dtype: torch.dtype,
) -> RowLogprobs:
    """Return log-probabilities row by row, the best in order of falling logit and rising id."""
    values = torch.zeros(len(logits), 1 + most, dtype=dtype, device=logits.device)
    ids = torch.full((len(logits), most), -1, dtype=torch.int32, device=logits.device)
    for b, row in enumerate(logits.to(dtype)):
        asked, token = int(wanted[slots[b]]), int(tokens[b])
        if asked < 0:
            continue
        logit, is_nan = row.tolist(), bool(row.isnan().any())
        logprobs = row - row.logsumexp(0)
        if is_nan:
            logprobs.fill_(math.nan)
        values[b, 0] = logprobs[token] if 0 <= token < len(row) else math.nan
        best = sorted(range(len(row)), key=lambda t: (-logit[t], t))[: min(asked, most)]
        values[b, 1 : 1 + len(best)] = logprobs[best]
        if not is_nan:
            ids[b, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return RowLogprobs(values, ids)
