"""Softmax attention of one sequence in fp32, over keys that come in tiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch


class LogitRule(NamedTuple):
    """How a logit is formed, and which keys a query sees.

    logit = scale · q·k, then softcap · tanh(logit / softcap) if softcap > 0. The query at position
    p sees key j if p - left <= j <= p + right (-1: no limit), and if `causal` only j <= p.
    """

    scale: float
    causal: bool
    left: int
    right: int
    softcap: float

    def span(self, position: int, k_len: int) -> tuple[int, int]:
        """Return the first key that the query at `position` sees and the one after the last."""
        first = max(0, position - self.left) if self.left >= 0 else 0
        stop = k_len
        if self.causal or self.right >= 0:
            stop = min(k_len, position + 1 + (0 if self.causal else self.right))
        return first, stop

    def spans(
        self, positions: torch.Tensor, k_len: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `span` of each of `positions` [rows], for k_len [] on their device."""
        first = torch.zeros_like(positions)
        if self.left >= 0:
            first = (positions - self.left).clamp_min_(0)
        stop = k_len.expand_as(positions)
        if self.causal or self.right >= 0:
            stop = torch.minimum(stop, positions + 1 + (0 if self.causal else self.right))
        return first, stop


def attend(
    q: torch.Tensor,
    spans: tuple[torch.Tensor, torch.Tensor],
    tiles: Iterable[tuple[int, tuple[torch.Tensor, torch.Tensor]]],
    rule: LogitRule,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with an online softmax (Milakov and Gimelshein, 2018).

    Args:
        q: [rows, heads_q, dim] fp32.
        spans: (first, stop), each [rows]: each row sees the keys first .. stop - 1.
        tiles: (index of the tile's first key, (keys, values)), both [T, heads_kv, dim] fp32 and
            finite where no row sees them.
        rule: how logits are formed; its visibility is already in `spans`.
        sinks: [heads_q] fp32, or None.

    Returns:
        (out [rows, heads_q, dim], lse [rows, heads_q]), fp32. The LSE is the natural logarithm of
        the softmax denominator, the sink included; rows that see no key have out 0 and LSE -inf.
    """
    rows, heads_q, dim = q.shape
    by_head = q.transpose(0, 1)
    # A sink is a logit that comes before all keys and has no value.
    if sinks is None:
        maximum = q.new_full((heads_q, rows, 1), float("-inf"))
        total = q.new_zeros(heads_q, rows, 1)
    else:
        maximum = sinks.view(-1, 1, 1).expand(heads_q, rows, 1)
        total = q.new_ones(heads_q, rows, 1)
    acc = q.new_zeros(heads_q, rows, dim)
    first, stop = (bound.unsqueeze(1) for bound in spans)
    for start, (k, v) in tiles:
        heads_kv = k.size(1)
        logits = torch.bmm(by_head.reshape(heads_kv, -1, dim), k.permute(1, 2, 0))
        logits = logits.view(heads_q, rows, -1) * rule.scale
        if rule.softcap > 0:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        key = torch.arange(start, start + k.size(0), device=q.device)
        logits = logits.masked_fill((key < first) | (key >= stop), float("-inf"))
        new_maximum = torch.maximum(maximum, logits.amax(dim=-1, keepdim=True))
        # Where nothing has been seen yet, -inf minus -inf would be NaN.
        shift = new_maximum.masked_fill(new_maximum == float("-inf"), 0.0)
        weights = torch.exp(logits - shift)
        rescale = torch.exp(maximum - shift)
        total = total * rescale + weights.sum(dim=-1, keepdim=True)
        product = torch.bmm(weights.view(heads_kv, -1, k.size(0)), v.transpose(0, 1))
        acc = acc * rescale + product.view(heads_q, rows, dim)
        maximum = new_maximum
    empty = stop <= first
    out = (acc / total).masked_fill(empty, 0.0)
    lse = (maximum + total.log()).masked_fill(empty, float("-inf"))
    return out.transpose(0, 1), lse.squeeze(-1).t()
