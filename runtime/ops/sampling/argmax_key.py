"""Places of tokens among all of their rows, as kernels hand them over (csrc/common/argmax_key.cuh).

By falling logit, then by rising id, in 64 bits without a sign: the smaller, the better, with the
token in the lower 32. Here they are int64.
"""

from __future__ import annotations

import torch

_SIGN, _LOWER_HALF = -(1 << 63), (1 << 32) - 1


def argmax_keys(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax keys of each row of logits [M, V] fp32, as [M, 1]."""
    token = logits.argmax(dim=1, keepdim=True)
    logit = logits.gather(1, token) + 0.0
    bits = logit.view(torch.int32).long() & _LOWER_HALF
    falling = torch.where(bits >> 31 == 0, ~bits ^ (1 << 31), bits) & _LOWER_HALF
    return torch.where(logit.isnan(), 0, falling) << 32 | token


def argmax_tokens(places: torch.Tensor) -> torch.Tensor:
    """Return the token [M] of the best of each row of places [M, P]; -1 where that is NaN."""
    best = (places ^ _SIGN).amin(dim=1) ^ _SIGN
    return torch.where(best >> 32 == 0, -1, best & _LOWER_HALF)
