"""The tokens that a step with prompts samples: texts' next ones, and the first of what ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import ops
from .decode_step import SeenTokens, sampling_counters, sampling_inputs
from .logits_processing import LogitsProcessing
from .request import Request
from .upload import upload


def sampled_tokens(
    requests: Sequence[Request],
    last_tokens: torch.Tensor,
    logits: torch.Tensor,
    seen: SeenTokens,
    processing: LogitsProcessing | None,
) -> tuple[torch.Tensor, ops.RowLogprobs | None]:
    """Return the next token [n] int64 of each request, and log-probabilities if one wants some.

    They are those that a captured decode step would sample.

    Args:
        requests: [n] in slots.
        last_tokens: [m] int64, what the first m of them sampled last; the others have no token yet.
        logits: [n, vocab_size] fp32, a row for each.
        seen: the tokens of their prompts and texts.
        processing: of an engine that processes logits.
    """
    device = logits.device
    if not requests:
        return torch.empty(0, dtype=torch.int64, device=device), None
    slots = upload(torch.tensor([request.slot for request in requests]), device)
    counters = sampling_counters(requests, device)
    inputs = sampling_inputs(requests, device)
    if processing is not None and any(request.needs_processing for request in requests):
        processing.write_masks(requests)
        last = torch.zeros_like(slots)
        last[: len(last_tokens)] = last_tokens
        return processing.sample(
            logits, slots=slots, tokens=last, seen=seen.mask, counters=counters, **inputs
        )
    tokens = ops.sample(logits, seen=seen.mask, seen_rows=slots, counters=counters, **inputs)
    return tokens, None
