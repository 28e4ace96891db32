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
    tiles: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    value_dim: int,
    rule: LogitRule,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with an online softmax (Milakov and Gimelshein, 2018).

    Args:
        q: [rows, heads_q, dim] fp32.
        tiles: (keys, values, seen): keys [T, heads_kv, dim] and values [T, heads_kv, value_dim]
            fp32, and which of them each row sees, [rows, T] bool or None for all. What a row does
            not see leaves no trace in its result, not even NaN.
        value_dim: that of values, for where there are no tiles.
        rule: how logits are formed; its visibility is already in `seen`.
        sinks: [heads_q] fp32, or None.

    Returns:
        (out [rows, heads_q, value_dim], lse [rows, heads_q]), fp32, arbitrary for rows that see no
        key. The LSE is the natural logarithm of the softmax denominator, the sink included.
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
    acc = q.new_zeros(heads_q, rows, value_dim)
    for k, v, seen in tiles:
        heads_kv = k.size(1)
        logits = torch.bmm(by_head.reshape(heads_kv, -1, dim), k.permute(1, 2, 0))
        logits = logits.view(heads_q, rows, -1) * rule.scale
        if rule.softcap > 0:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        if seen is not None:
            logits = logits.masked_fill(~seen, float("-inf"))
        new_maximum = torch.maximum(maximum, logits.amax(dim=-1, keepdim=True))
        # Where nothing has been seen yet, -inf minus -inf would be NaN.
        shift = new_maximum.masked_fill(new_maximum == float("-inf"), 0.0)
        weights = torch.exp(logits - shift)
        rescale = torch.exp(maximum - shift)
        total = total * rescale + weights.sum(dim=-1, keepdim=True)
        acc = acc * rescale + _weighted_sum(weights, v, seen)
        maximum = new_maximum
    out, lse = acc / total, maximum + total.log()
    return out.transpose(0, 1), lse.squeeze(-1).t()


def _weighted_sum(
    weights: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum over keys of weights [heads_q, rows, T] times v [T, heads_kv, dim].

    The result is [heads_q, rows, dim]. A key has no part in the sum of rows that do not see it.
    """
    heads_q, rows, keys = weights.shape
    _, heads_kv, dim = v.shape
    # A weight of 0 does not silence NaN or an infinity, so that these must be summed apart.
    finite = v if seen is None else v.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    product = torch.bmm(weights.view(heads_kv, -1, keys), finite.transpose(0, 1))
    if seen is not None:
        excess = sum_of_infinities(v, seen).transpose(0, 1).unsqueeze(1)
        product = product.view(heads_kv, -1, rows, dim) + excess
    return product.view(heads_q, rows, dim)


def sum_of_infinities(v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return, per row of `seen` [rows, T], the sum of what is not finite in v [T, heads_kv, dim].

    It is 0, an infinity or NaN, in a tensor [rows, heads_kv, dim].
    """
    # NaN counts as infinities of both signs, whose sum it is. Counts are exact in any order.
    nan = v.isnan()
    signs = torch.stack([(v == float("inf")) | nan, (v == float("-inf")) | nan], dim=1)
    counts = (seen.float() @ signs.float().flatten(1)).view(-1, *signs.shape[1:])
    infinities = torch.zeros_like(counts).masked_fill_(counts > 0, float("inf"))
    return infinities[:, 0] - infinities[:, 1]
