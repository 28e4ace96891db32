"""What requests ask of their logits: tables on the device, and the ops that read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ostinato.graphs import Variant

from .. import ops
from ..ops.sampling.process_logits import mask_words
from .logprobs import MOST_LOGPROBS
from .request import Request
from .upload import upload

PROCESSED = Variant(name="processed")  # what a report calls these graphs
MOST_EDITS = 1024  # tokens of a request that have a bias, or may not be sampled yet
_NOT_WANTED = -1


class Sampled(NamedTuple):
    """Tokens [B] int64, and their log-probabilities where a row wants some."""

    tokens: torch.Tensor
    logprobs: ops.RowLogprobs


class LogitsProcessing:
    """Per-slot inputs of the decode step's second variant, which processes logits.

    Steps without a request that needs it run the first, which does not know of this. One row per
    slot and one more, which padding rows own.

    Args:
        num_slots: of the engine.
        vocab_size: of the model.
        max_context: the longest prompt plus text.
        device: of the model.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, max_context: int, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        # Made in inference mode they could not be written outside it.
        with torch.inference_mode(False):
            self._tables = ops.LogitsTables.neutral(
                num_slots + 1, vocab_size, max_context, MOST_EDITS, device
            )
            self._wanted = torch.full(
                (num_slots + 1,), _NOT_WANTED, dtype=torch.int32, device=device
            )
        self._used: set[int] = set()  # slots whose rows are not neutral
        self._matched: list[Request] = []  # running, with a grammar; perhaps some that are not

    @staticmethod
    def slot_bytes(vocab_size: int, max_context: int) -> int:
        """Return the bytes that a slot takes."""
        return 4 * (max_context + mask_words(vocab_size)) + 16 * MOST_EDITS

    def memory(self) -> tuple[torch.Tensor, ...]:
        """Return all tables."""
        return (*vars(self._tables).values(), self._wanted)

    def sample(
        self,
        logits: torch.Tensor,
        *,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        counters: torch.Tensor,
        repetition_penalty: torch.Tensor,
        seen: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
    ) -> Sampled:
        """Process logits [B, V] fp32 and sample from them, three launches on a GPU.

        A row that asks for nothing gets the bits that `ops.sample` alone would give it.

        `tokens` [B] int64 are the last of the `counters` tokens that each row has generated; the
        others are as `ops.process_logits` and `ops.sample` have them.
        """
        processed = ops.process_logits(
            logits,
            self._tables,
            slots=slots,
            counters=counters,
            tokens=tokens,
            repetition_penalty=repetition_penalty,
            seen=seen,
        )
        sampled = ops.sample(
            processed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            counters=counters,
        )
        logprobs = ops.token_logprobs(
            logits, sampled, wanted=self._wanted, slots=slots, most=MOST_LOGPROBS
        )
        return Sampled(sampled, logprobs)

    def reset(self, requests: Sequence[Request]) -> None:
        """Start the slots of requests anew, each with its text so far."""
        changed = [r for r in requests if r.processes_logits or r.slot in self._used]
        if not changed:
            return
        params = [request.sampling_params for request in changed]
        edits = [_edits(request) for request in changed]
        longest = max(1, *map(len, edits))
        # Padded to the longest: the number of edits says which count.
        padded = [[*rows, *[(0, 0.0, 0)] * (longest - len(rows))] for rows in edits]
        ids, values, ends = (
            [[edit[part] for edit in rows] for rows in padded] for part in range(3)
        )
        wanted = [_NOT_WANTED if p.logprobs is None else p.logprobs for p in params]
        slots = upload(torch.tensor([request.slot for request in changed]), self._wanted.device)
        tables = self._tables
        self._write(tables.frequency, slots, [p.frequency_penalty for p in params])
        self._write(tables.presence, slots, [p.presence_penalty for p in params])
        self._write(tables.edits, slots, [len(rows) for rows in edits])
        self._write(tables.edit_ids[:, :longest], slots, ids)
        self._write(tables.edit_values[:, :longest], slots, values)
        self._write(tables.edit_ends[:, :longest], slots, ends)
        self._write(tables.masked, slots, [int(r.matcher is not None) for r in changed])
        self._write(self._wanted, slots, wanted)
        texts = [request.generated for request in changed]
        length = max(map(len, texts))
        if length:
            rows = [[*text, *[0] * (length - len(text))] for text in texts]
            self._write(tables.history[:, :length], slots, rows)
        self._matched += [request for request in changed if request.matcher is not None]
        self._used.difference_update(request.slot for request in changed)
        self._used.update(request.slot for request in changed if request.processes_logits)

    @property
    def waits_for_host(self) -> bool:
        """Whether a running request has a grammar, and a token that the host has not read."""
        self._matched = [request for request in self._matched if request.slot >= 0]
        return any(request.async_tokens for request in self._matched)

    def write_masks(self, requests: Sequence[Request]) -> None:
        """Write which tokens the grammars of requests allow next; others have none."""
        matched = [(r.slot, r.matcher) for r in requests if r.matcher is not None]
        if not matched:
            return
        masks = torch.empty(len(matched), mask_words(self._vocab_size), dtype=torch.int32)
        for row, (_, matcher) in enumerate(matched):
            matcher.fill(masks, row)
        device = self._wanted.device
        slots = upload(torch.tensor([slot for slot, _ in matched]), device)
        self._tables.mask.index_copy_(0, slots, upload(masks, device))

    @contextmanager
    def examples(self) -> Iterator[None]:
        """Fill the tables at random while steps are verified, and empty them afterwards."""
        generator = torch.Generator().manual_seed(0)
        tables, vocabulary = self._tables, self._vocab_size

        def integers(target: torch.Tensor, low: int, high: int) -> None:
            drawn = torch.randint(low, high, target.shape, generator=generator)
            target.copy_(drawn)

        try:
            for target in (tables.frequency, tables.presence, tables.edit_values):
                target.copy_(torch.randn(target.shape, generator=generator))
            for target in (tables.history, tables.edit_ids):
                integers(target, 0, vocabulary)
            # A token has at most two edits, of which no sum depends on the order.
            integers(tables.edits, 0, 3)
            integers(tables.edit_ends, 0, 100)
            integers(tables.masked, 0, 2)
            integers(tables.mask, -(2**31), 2**31)
            integers(self._wanted, _NOT_WANTED, MOST_LOGPROBS + 1)
            yield
        finally:
            for table in vars(tables).values():
                table.zero_()
            self._wanted.fill_(_NOT_WANTED)
            self._used.clear()

    def _write(
        self,
        table: torch.Tensor,
        slots: torch.Tensor,
        rows: Sequence[float] | Sequence[Sequence[float]],
    ) -> None:
        values = torch.tensor(rows, dtype=table.dtype)
        table.index_copy_(0, slots, upload(values, table.device))


def _edits(request: Request) -> list[tuple[int, float, int]]:
    """Return what is added to which token's logit, until so many tokens have been generated."""
    params = request.sampling_params
    biases = [(token, bias, request.max_new_tokens) for token, bias in params.logit_bias.items()]
    least = min(params.min_tokens, request.max_new_tokens)
    return biases + [(token, -math.inf, least) for token in request.forbidden_ids]
