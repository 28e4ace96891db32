"""The tokens that a step with prompts samples: texts' next ones, and the first of what ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import ops
from ..models import Decoder, Sampling
from .decode_step import SeenTokens, sampling_counters, sampling_inputs
from .logits_processing import LogitsProcessing
from .request import Request
from .upload import upload


def sampled_tokens(
    model: Decoder,
    hidden: tuple[torch.Tensor, torch.Tensor],
    requests: Sequence[Request],
    last_tokens: torch.Tensor,
    seen: SeenTokens,
    processing: LogitsProcessing | None,
) -> tuple[torch.Tensor, ops.RowLogprobs | None]:
    """Return the next token [n] int64 of each request, and log-probabilities if one wants some.

    They are those that a captured decode step would sample.

    Args:
        model: what computes logits.
        hidden: what these are computed of, [n, hidden_size] each; see `Decoder.logits`.
        requests: [n] in slots.
        last_tokens: [m] int64, what the first m of them sampled last; the others have no token yet.
        seen: the tokens of their prompts and texts.
        processing: of an engine that processes logits.
    """
    device = model.device
    if not requests:
        return torch.empty(0, dtype=torch.int64, device=device), None
    slots = upload(torch.tensor([request.slot for request in requests]), device)
    counters = sampling_counters(requests, device)
    inputs = sampling_inputs(requests, device)
    if processing is not None and any(request.needs_processing for request in requests):
        processing.write_masks(requests)
        last = last_tokens if last_tokens.is_cuda else upload(last_tokens, device)
        none = torch.zeros(len(requests) - len(last), dtype=torch.int64, device=device)
        return processing.sample(
            model.logits(*hidden),
            slots=slots,
            tokens=torch.cat([last, none]),
            seen=seen.mask,
            counters=counters,
            **inputs,
        )
    # As a decode step caps them: equal logits that were not equal would be another token.
    sampling = Sampling(inputs["temperature"], inputs["repetition_penalty"])
    logits = model.logits(*hidden, sampling=sampling)
    tokens = ops.sample(logits, seen=seen.mask, seen_rows=slots, counters=counters, **inputs)
    return tokens, None
