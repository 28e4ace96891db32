"""The readable twins of `ops.sample` and `ops.softcap`; see `ostinato.ops.reference`."""

from __future__ import annotations

import math

import torch

from .philox import uniform


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    repetition_penalty: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose a token row by row, the candidates in order of falling logit and rising id."""
    tokens = []
    for b, row in enumerate(logits.float().cpu()):
        if repetition_penalty is not None and seen is not None:
            penalty = repetition_penalty[b].cpu()
            penalized = torch.where(row > 0, row / penalty, row * penalty)
            row = torch.where(seen[b].cpu(), penalized, row)
        logit = row.tolist()
        if any(map(math.isnan, logit)):
            tokens.append(-1)
            continue
        order = sorted(range(len(logit)), key=lambda t: (-logit[t], t))
        if temperature[b] == 0 or not math.isfinite(logit[order[0]]):
            tokens.append(order[0])
            continue
        if top_k[b] > 0:
            order = order[: int(top_k[b])]
        best, divisor = logit[order[0]], float(temperature[b])
        weights = [math.exp((logit[token] - best) / divisor) for token in order]

        if top_p[b] < 1:
            wanted, nucleus, mass = float(top_p[b]) * sum(weights), 1, weights[0]
            while nucleus < len(weights) and mass < wanted:
                mass += weights[nucleus]
                nucleus += 1
            weights = weights[:nucleus]
        least = float(min_p[b])
        weights = [weight for weight in weights if weight >= least] or weights[:1]

        threshold = float(uniform(seeds[b], counters[b])) * sum(weights)
        index, passed = 0, weights[0]
        while passed <= threshold and index + 1 < len(weights):
            index += 1
            passed += weights[index]
        tokens.append(order[index])
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def softcap(
    logits: torch.Tensor,
    cap: float,
    *,
    temperature: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the capped logits, row by row; greedy rows without a penalty as they are."""
    out = logits.to(dtype, copy=True)
    for row in range(len(out)):
        greedy = temperature is not None and not temperature[row] > 0
        if not greedy or (repetition_penalty is not None and repetition_penalty[row] != 1):
            out[row] = cap * torch.tanh(logits[row].to(dtype) / cap)
    return out
