"""Attention over a batch on the CPU, reading only what is live.

Keys are worked through in tiles at fixed positions of a sequence, with an online softmax (Milakov
and Gimelshein, 2018), and rows of queries in numbers that the library multiplies alike. So the bits
of a query's result depend on the query and the keys it sees and on nothing else: neither on other
sequences, nor on how a sequence is cut into chunks. A key that a row does not see has weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn import functional

from ..common.alike import Alike, cancelling, pieces
from ..common.precision import full_precision
from ..common.sizes import round_up
from .kv_view import KV, Spans
from .softmax_torch import LogitRule, sum_of_infinities

_TILES = (64, 128, 256)  # keys: tiles begin at 0, at each of these, and at multiples of the last
_VECTOR = 16  # elements: matrices of other dims would not all start alike in a cache line
_MOST_ROWS = 192  # of a block, whose logits of a tile then fit the second-level cache
_MOST_HEADS = 128  # of sequences that are computed together, whose keys of a tile are in memory
_LOWEST = torch.finfo(torch.float32).min

_alike: dict[tuple[int, ...], Alike[tuple[int, int]]] = {}


def attend_live(
    q: torch.Tensor,
    q_bounds: list[int],
    k_lens: list[int],
    kv: KV,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend with all sequences of a batch.

    Sequence b has the rows q_bounds[b] .. q_bounds[b + 1] - 1 of q [tokens, heads_q, dim] and
    k_lens[b] keys. Rows of `out` (and `lse` [tokens, heads_q]) of no sequence stay as they are.
    """
    full_precision(q.device)
    of_length: dict[int, list[int]] = {}
    for b in range(len(k_lens)):
        of_length.setdefault(q_bounds[b + 1] - q_bounds[b], []).append(b)
    heads = kv.k.size(-2)
    group = q.size(1) // heads
    for q_len, members in of_length.items():
        if q_len == 0:
            continue
        members.sort(key=lambda b: -k_lens[b])  # those that end in a tile are the last ones
        step = max(1, min(_MOST_ROWS // (q_len * group), _MOST_HEADS // heads))
        for at in range(0, len(members), step):
            part = members[at : at + step]
            # Every query of every sequence is a row, and the heads of one KV head are a group.
            rows = [row for b in part for row in range(q_bounds[b], q_bounds[b + 1])]
            index = torch.tensor(rows, device="cpu")
            found = _Sequences(q.index_select(0, index), part, [k_lens[b] for b in part], kv, rule)
            blocks = found.attend(sinks)
            result = _joined([block.out() for block in blocks])[:, :, : kv.v.size(-1)]
            out.index_copy_(0, index, found.by_query(result.to(out.dtype)))
            if lse is not None:
                result = _joined([block.lse() for block in blocks])
                lse.index_copy_(0, index, found.by_query(result).squeeze(2))


class _Sequences:
    """Sequences with as many queries each, the longest first.

    Args:
        q: [n * q_len, heads_q, dim].
        members: n sequences of the batch.
        k_lens: their keys.
        kv: keys and values of the batch.
        rule: how logits are formed.
    """

    def __init__(
        self, q: torch.Tensor, members: list[int], k_lens: list[int], kv: KV, rule: LogitRule
    ) -> None:
        self.k_lens = k_lens
        self.rule = rule
        self.heads = kv.k.size(-2)
        self.group = q.size(1) // self.heads
        self.q_len = q.size(0) // len(members)
        self.dims = (round_up(q.size(2), _VECTOR), round_up(kv.v.size(-1), _VECTOR))
        self.alike = _alike_products(self.heads, *self.dims)
        self.lengths = torch.tensor(k_lens, device="cpu").unsqueeze(1)
        self._kv = kv
        self._members = torch.tensor(members, device="cpu")
        # The queries of the heads that share a KV head are the rows of one matrix.
        rows = q.view(len(members), self.q_len, self.heads, self.group, q.size(2)).transpose(1, 2)
        rows = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        rows = rows.mul_(rule.scale).view(len(members) * self.heads, -1, q.size(2))
        self.rows = _padded(rows, self.dims[0])

    def attend(self, sinks: torch.Tensor | None) -> list[_Block]:
        """Return all rows, having attended."""
        blocks = [
            _Block(self, start, stop, size, sinks)
            for start, stop, size in pieces(self.rows.size(1), self._alike_rows, most=_MOST_ROWS)
        ]
        first = [span[0] for span in blocks[0].earliest]
        for start, stop in _tiles(min(first), max(self.k_lens)):
            live = sum(length > start for length in self.k_lens)
            seeing = [block for block in blocks if block.sees(start, stop, live)]
            if seeing:
                spans = Spans(self._members[:live], first[:live], self.k_lens[:live])
                k, v = self._kv.heads(spans, start, stop)
                # A weight of 0 does not silence NaN or an infinity.
                finite = math.isfinite(v.sum().item())
                keys, values = _padded(k, self.dims[0]).transpose(1, 2), _padded(v, self.dims[1])
                for block in seeing:
                    block.add(keys, values, start, stop, finite)
        return blocks

    def _alike_rows(self, rows: int) -> bool:
        return self.alike((self.heads, rows))

    def spans(self, query: int) -> list[tuple[int, int]]:
        """Return which keys a query sees in each sequence, as `LogitRule.span` does."""
        before = query - self.q_len
        return [self.rule.span(length + before, length) for length in self.k_lens]

    def by_query(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [n * heads_kv, q_len * group, dim] as [n * q_len, heads_q, dim]."""
        x = x.reshape(-1, self.heads, self.q_len, self.group, x.size(2)).transpose(1, 2)
        return x.reshape(-1, self.heads * self.group, x.size(4))


class _Block:
    """Rows `start` .. `stop` - 1 of every KV head of some sequences, computed as `size` rows."""

    def __init__(
        self,
        sequences: _Sequences,
        start: int,
        stop: int,
        size: int,
        sinks: torch.Tensor | None,
    ) -> None:
        rows, group = sequences.rows, sequences.group
        self._sequences = sequences
        self._begin = start
        self._count = stop - start
        self.earliest = self.latest = sequences.spans(start // group)
        if (stop - 1) // group > start // group:
            self.latest = sequences.spans((stop - 1) // group)
        self._q = rows[:, start:stop].contiguous()
        if size > self._count:
            self._q = functional.pad(self._q, (0, 0, 0, size - self._count))
        self._maximum: torch.Tensor | None = None  # of the logits so far; None before the first
        self._total = self._acc = rows  # sums of weights, and of weighted values
        if sinks is not None:
            # A sink is a logit that comes before all keys and has no value.
            of_row = torch.arange(start, start + size, device="cpu") % group
            by_head = sinks.view(sequences.heads, group)[:, of_row]
            self._start(by_head.repeat(len(sequences.k_lens), 1).unsqueeze(2), 1.0)

    def _start(self, maximum: torch.Tensor, total: float) -> None:
        self._maximum, self._total = maximum, torch.full_like(maximum, total)
        self._acc = maximum.new_zeros(*maximum.shape[:2], self._sequences.dims[1])

    def sees(self, start: int, stop: int, live: int) -> bool:
        """Return whether a row of the first `live` sequences sees a key in start .. stop - 1."""
        bounds = zip(self.earliest[:live], self.latest[:live], strict=True)
        return any(last[1] > start and first[0] < stop for first, last in bounds)

    def add(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int, finite: bool
    ) -> None:
        """Attend to a tile: keys [n * heads, dim, T], values [n * heads, T, value_dim] of n."""
        sequences, size = self._sequences, self._q.size(1)
        live = keys.size(0) // sequences.heads
        hidden = self._hidden(start, stop, live, finite)
        if self._maximum is None and live < len(sequences.k_lens):
            self._start(self._q.new_full((self._q.size(0), size, 1), -math.inf), 0.0)
        if sequences.alike((keys.size(0), size)):
            self._add(slice(keys.size(0)), keys, values, hidden, finite)
            return
        if self._maximum is None:
            self._start(self._q.new_full((self._q.size(0), size, 1), -math.inf), 0.0)
        for at in range(live):
            some = slice(at * sequences.heads, (at + 1) * sequences.heads)
            away = None if hidden is None else hidden[at : at + 1]
            self._add(some, keys[some], values[some], away, finite)

    def _hidden(self, start: int, stop: int, live: int, finite: bool) -> torch.Tensor | None:
        """Return which keys rows do not see, [live, size or 1, T]; None where they see all."""
        lengths = self._sequences.lengths[:live]
        bounds = list(zip(self.earliest[:live], self.latest[:live], strict=True))
        if finite and all(last[0] <= start and first[1] >= stop for first, last in bounds):
            return None
        position = torch.arange(start, stop, device="cpu")
        if finite and all(
            last[0] <= start and first[1] >= min(stop, length)
            for (first, last), length in zip(bounds, self._sequences.k_lens, strict=False)
        ):
            return position >= lengths.unsqueeze(2)
        first, after = self._spans(live)
        hidden = position >= after.unsqueeze(2)
        if self._sequences.rule.left >= 0:
            hidden |= position < first.unsqueeze(2)
        return hidden

    def _add(
        self,
        some: slice,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: torch.Tensor | None,
        finite: bool,
    ) -> None:
        """Attend with `some` rows of the state; `hidden` [n, size or 1, T] is what they miss."""
        softcap = self._sequences.rule.softcap
        logits = torch.bmm(self._q[some], keys)
        if softcap > 0:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        if hidden is not None:
            by_head = logits.view(hidden.size(0), -1, *logits.shape[1:])
            by_head.masked_fill_(hidden.unsqueeze(1), -math.inf)
        peak = logits.amax(dim=2, keepdim=True)
        if self._maximum is not None:
            peak = torch.maximum(self._maximum[some], peak)
        # Where nothing has been seen yet, -inf minus -inf would be NaN.
        shift = peak.clamp(min=_LOWEST)
        weights = logits.sub_(shift).exp_()
        added = weights.sum(dim=2, keepdim=True)
        product = torch.bmm(weights, values if finite else values.nan_to_num(0.0, 0.0, 0.0))
        if not finite and hidden is not None:
            by_sequence = product.unflatten(0, (hidden.size(0), -1))
            numbers = values.unflatten(0, (hidden.size(0), -1)).transpose(1, 2)
            for row, v, unseen in zip(by_sequence, numbers, hidden, strict=True):
                row += sum_of_infinities(v, ~unseen).transpose(0, 1)
        if self._maximum is None:
            self._maximum, self._total, self._acc = peak, added, product
            return
        rescale = self._maximum[some].sub_(shift).exp_()
        self._total[some].mul_(rescale).add_(added)
        self._acc[some].mul_(rescale).add_(product)
        self._maximum[some] = peak

    def out(self) -> torch.Tensor:
        """Return the attention [n * heads, rows, value_dim] of the real rows."""
        known = None if self._maximum is None else self._acc / self._total
        return self._real(known, self._sequences.dims[1], 0.0)

    def lse(self) -> torch.Tensor:
        """Return the logarithm of the denominators [n * heads, rows, 1] of the real rows."""
        known = None if self._maximum is None else self._maximum + self._total.log()
        return self._real(known, 1, -math.inf)

    def _real(self, x: torch.Tensor | None, dim: int, empty: float) -> torch.Tensor:
        """Return the real rows of x, `empty` in those that see no key; None is no key at all."""
        if x is None:
            x = self._q.new_full((*self._q.shape[:2], dim), empty)
        elif any(stop <= first for first, stop in self.earliest):
            first, after = self._spans(len(self._sequences.k_lens))
            blind = (after <= first).repeat_interleave(self._sequences.heads, 0)
            x = x.masked_fill(blind.unsqueeze(2), empty)
        return x[:, : self._count]

    def _spans(self, live: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `LogitRule.spans` of each row, [live, size] both; padding stands like the last."""
        sequences = self._sequences
        lengths = sequences.lengths[:live]
        rows = torch.arange(self._begin, self._begin + self._q.size(1), device="cpu")
        query = (rows // sequences.group).clamp_(max=sequences.q_len - 1)
        return sequences.rule.spans(lengths - sequences.q_len + query, lengths)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return x [..., at most dim] with zeros up to `dim`."""
    return x if x.size(-1) == dim else functional.pad(x, (0, dim - x.size(-1)))


def _tiles(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield where tiles begin and end that hold the keys first .. stop - 1."""
    begin, size = 0, _TILES[0]
    while begin < stop:
        if begin + size > first:
            yield begin, begin + size
        begin += size
        size = begin if begin in _TILES else size


def _alike_products(heads: int, dim: int, value_dim: int) -> Alike[tuple[int, int]]:
    """Return which (matrices, rows) of queries are multiplied alike by keys, and weights by values.

    Args:
        heads: KV heads, which a sequence has one matrix for each of.
        dim: of keys.
        value_dim: of values.
    """
    key = (heads, dim, value_dim, torch.get_num_threads())
    if key not in _alike:

        def trial(shape: tuple[int, int]) -> torch.Tensor:
            def product(row: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
                rows = row.expand(*shape, -1).contiguous()
                return torch.bmm(rows, columns.expand(shape[0], -1, -1)).flatten(0, 1)

            found = []
            for tile in _TILES:
                q, keys = cancelling(dim, tile, torch.float32)
                weights, values = cancelling(tile, value_dim, torch.float32)
                # In memory a key is a row, and so is a value.
                found += [product(q, keys.t()), product(weights, values.t().contiguous())]
            return torch.cat(found, dim=1)

        _alike[key] = Alike(trial, [(heads, rows) for rows in (8, 4, 2, 1)])
    return _alike[key]
