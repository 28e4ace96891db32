"""Philox4x32-10, a counter-based random number generator, in torch integer arithmetic.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return four random 32-bit words for each counter (four words) under its key (two words).

    Words are int64 tensors of values 0 .. 2³²-1, all of one shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two 32-bit words fills an int64; wrapping leaves its 64 bits as they are.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(p1) ^ c1 ^ k0, p1 & _MASK, _high(p0) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return one fp64 number in [0, 1) for each seed and counter (int64, of one shape).

    The seed is the key, the counter the low half of Philox's; the number has 53 random bits.
    """
    zero = torch.zeros_like(counters)
    low, high, _, _ = philox4x32(
        (counters & _MASK, _high(counters), zero, zero), (seeds & _MASK, _high(seeds))
    )
    return ((low >> 5) * 2**26 + (high >> 6)).double() * 2.0**-53


def _high(word: torch.Tensor) -> torch.Tensor:
    return (word >> 32) & _MASK
