"""The decode step that is captured: one token per request in, the next one sampled out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import torch

from ostinato.graphs import Add, BatchView, BufferSpec, BurstRules, Feed, Slot
from ostinato.graphs.buffer_spec import Example
from ostinato.graphs.declared_memory import DeclaredMemory

from .. import ops
from ..models import DUMMY_PAGE, AttentionInputs, Decoder, PagedKVCache, Sampling, SeenRows
from .capture_examples import CaptureExamples, integers
from .logits_processing import PROCESSED, LogitsProcessing
from .request import Request
from .upload import upload

_HOST = torch.device("cpu")


class SeenTokens:
    """Which tokens each slot's request has read or written, for the repetition penalty.

    One row per slot and one more, `padding_slot`, that padding rows own.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.padding_slot = num_slots
        # Made in inference mode it could not be written outside it.
        with torch.inference_mode(False):
            self.mask = torch.zeros(num_slots + 1, vocab_size, dtype=torch.bool, device=device)

    def rows(self, slots: torch.Tensor) -> SeenRows:
        """Return where a model notes tokens [T] of these slots [T]."""
        return SeenRows(self.mask, slots)

    def reset(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Start slots anew, each with the tokens of its prompt and text so far."""
        if not texts:
            return
        lengths = torch.tensor([len(tokens) for tokens in texts.values()])
        slots = torch.tensor(list(texts))
        rows = slots.repeat_interleave(lengths)
        columns = torch.tensor([token for tokens in texts.values() for token in tokens])
        device = self.mask.device
        self.mask.index_fill_(0, upload(slots, device), False)
        places = rows * self.mask.size(1) + columns
        self.mask.view(-1).index_fill_(0, upload(places, device), True)


class DecodeRows(NamedTuple):
    """One more token of each of B texts, a row for each, as `DecodeStep.buffer_specs` has them.

    On the host, but tokens that have not been read yet.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor


class DecodeStep:
    """A step function for `GraphRunner`: mark as seen and embed, decode, sample.

    Outputs `tokens` [B] int64 and what they were chosen from: `logits` [B, vocab_size] fp32, or
    where the output projection hands over each row's best, `argmax` [B, parts] int64. Of a model
    that caps logits, greedy rows without a penalty are not capped, unless all are asked for. The
    variant `PROCESSED` outputs `tokens`, `logprobs` and `logprob_ids` (see `ops.token_logprobs`);
    in it, too, a row that asks for no processing gets the same token.

    Args:
        model, cache: what the step runs on.
        seen: per-slot state of the repetition penalty.
        max_pages: columns of the page table: the pages of the longest context.
        capture_examples: where the examples of a verification read and write; without it
            `slot_mapping` and `page_table` have none.
        logits: output all logits in any case, which takes longer.
        processing: of the variant `PROCESSED`; without it there is none.

    Attributes:
        asking: the requests of the last `inputs` or `rows`, for some of whose steps logits are
            processed.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        seen: SeenTokens,
        max_pages: int,
        *,
        capture_examples: CaptureExamples | None = None,
        logits: bool = False,
        processing: LogitsProcessing | None = None,
    ) -> None:
        self._model = model
        self._all_logits = logits
        self._processing = processing
        self._cache = cache
        self._seen = seen
        self.max_pages = max_pages
        self._capture_examples = capture_examples
        self._pages = _PageRows(cache, seen.padding_slot, max_pages)
        self._constants_of: list[tuple[int, int]] | None = None
        self._constants: dict[str, object] = {}
        self.asking: list[Request] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def buffer_specs(self) -> dict[str, BufferSpec]:
        """Return the step's inputs; padding rows attend to nothing and write to no slot."""
        capture_examples = self._capture_examples
        vocab_size = self._model.config.vocab_size
        max_length = min(self._model.max_context, self.max_pages * self._cache.page_size)
        return {
            "tokens": BufferSpec((), torch.int64, 0, integers(0, vocab_size)),
            "positions": BufferSpec((), torch.int32, 0, integers(0, max_length)),
            "seq_lens": BufferSpec((), torch.int32, 0, integers(1, max_length + 1)),
            "slot_mapping": BufferSpec(
                (),
                torch.int64,
                -1,
                None if capture_examples is None else capture_examples.slot_mapping,
            ),
            "page_table": BufferSpec(
                (self.max_pages,),
                torch.int32,
                DUMMY_PAGE,
                None if capture_examples is None else capture_examples.page_table,
            ),
            "slots": BufferSpec((), torch.int64, self._seen.padding_slot, _distinct),
            "temperature": BufferSpec((), torch.float32, 0.0, _one_of(0.0, 0.7, 1.3)),
            "top_k": BufferSpec((), torch.int32, 0, integers(0, vocab_size + 1)),
            "top_p": BufferSpec((), torch.float32, 1.0, _one_of(0.5, 0.9, 1.0)),
            "min_p": BufferSpec((), torch.float32, 0.0, _one_of(0.0, 0.05)),
            "repetition_penalty": BufferSpec((), torch.float32, 1.0, _one_of(1.0, 1.3)),
            "seeds": BufferSpec((), torch.int64, 0, integers(0, 2**62)),
            "counters": BufferSpec((), torch.int64, 0, integers(0, max_length)),
        }

    def memory(self) -> DeclaredMemory:
        """Return what the step works on besides its buffers, for `GraphRunner(memory=...)`."""
        return {
            "model": tuple(self._model.tensors()),
            "cache": self._cache.tensors(),
            "seen": self._seen.mask,
            "processing": () if self._processing is None else self._processing.memory(),
        }

    def burst_rules(self, max_steps: int) -> BurstRules:
        """Return how the step feeds itself: the sampled token is the next input, one place on."""
        return BurstRules(
            {
                "tokens": Feed("tokens"),
                "positions": Add(),
                "seq_lens": Add(),
                "slot_mapping": Slot("page_table", "positions", self._cache.page_size),
                "counters": Add(),
            },
            max_steps=max_steps,
        )

    def __call__(self, batch: BatchView) -> dict[str, torch.Tensor]:
        """Run the step over a batch of the buffers above."""
        # The input tokens, not the sampled ones: marking them twice changes nothing, so a
        # replay can be repeated and verified. The model does it first, since its last product
        # lets the sampling start early.
        seen = self._seen.rows(batch.slots)
        attention = AttentionInputs(
            slot_mapping=batch.slot_mapping, page_table=batch.page_table, seq_lens=batch.seq_lens
        )
        inputs = (batch.tokens, batch.positions, attention, self._cache)
        if batch.variant == PROCESSED and self._processing is not None:
            sampled = self._processing.sample(
                self._model(*inputs, n_active=batch.n_active, seen=seen),
                tokens=batch.tokens,
                slots=batch.slots,
                seen=self._seen.mask,
                counters=batch.counters,
                repetition_penalty=batch.repetition_penalty,
                temperature=batch.temperature,
                top_k=batch.top_k,
                top_p=batch.top_p,
                min_p=batch.min_p,
                seeds=batch.seeds,
            )
            values, ids = sampled.logprobs
            return {"tokens": sampled.tokens, "logprobs": values, "logprob_ids": ids}
        if self._all_logits:
            logits = ops.Logits(self._model(*inputs, n_active=batch.n_active, seen=seen))
        else:
            sampling = Sampling(batch.temperature, batch.repetition_penalty)
            logits = self._model.logits_to_sample(
                *inputs, sampling, n_active=batch.n_active, seen=seen
            )
        tokens = ops.sample(
            logits.values,
            temperature=batch.temperature,
            top_k=batch.top_k,
            top_p=batch.top_p,
            min_p=batch.min_p,
            seeds=batch.seeds,
            counters=batch.counters,
            repetition_penalty=batch.repetition_penalty,
            seen=self._seen.mask,
            seen_rows=batch.slots,
            argmax=logits.argmax,
        )
        if logits.argmax is not None:
            return {"tokens": tokens, "argmax": logits.argmax}
        return {"tokens": tokens, "logits": logits.values}

    def inputs(self, requests: Sequence[Request], last_tokens: torch.Tensor) -> dict[str, object]:
        """Return the step's inputs for one more token of each request (its slot reserved).

        Args:
            requests: [B] of them.
            last_tokens: the token that each sampled last, [B] int64.
        """
        rows = self.rows(requests, last_tokens)
        return {
            **rows._asdict(),
            "counters": sampling_counters(requests),
            **self._constant_inputs(requests),
        }

    def rows(self, requests: Sequence[Request], last_tokens: torch.Tensor) -> DecodeRows:
        """Return what `inputs` has of the sequences, without how they are sampled."""
        lengths = torch.tensor([request.length for request in requests], dtype=torch.int64)
        self._constant_inputs(requests)
        table = self._pages.rows(requests, self._slots)
        page, offset = lengths // self._cache.page_size, lengths % self._cache.page_size
        # The page that holds the new token's slot.
        written = table.gather(1, page[:, None])[:, 0].long()
        return DecodeRows(
            tokens=last_tokens,
            positions=lengths.int(),
            seq_lens=(lengths + 1).int(),
            slot_mapping=written * self._cache.page_size + offset,
            page_table=table,
            slots=self._slots,
        )

    def _constant_inputs(self, requests: Sequence[Request]) -> dict[str, object]:
        """Return what does not change from step to step; made anew when the requests change."""
        key = [(request.id, request.slot) for request in requests]
        if key != self._constants_of:
            slots = torch.tensor([request.slot for request in requests], dtype=torch.int64)
            self._constants_of = None  # until all of them are there
            self._constants = {"slots": slots, **sampling_inputs(requests)}
            self.asking = [request for request in requests if request.processes_logits]
            self._slots, self._constants_of = slots, key
        return self._constants


class _PageRows:
    """The page table on the host, a row per slot, of which only what changed is written."""

    def __init__(self, cache: PagedKVCache, num_slots: int, max_pages: int) -> None:
        self._cache = cache
        # Made in inference mode it could not be written outside it.
        with torch.inference_mode(False):
            self._table = torch.full((num_slots, max_pages), DUMMY_PAGE, dtype=torch.int32)
        self._written = [0] * num_slots  # versions of pages; the cache counts from 1

    def rows(self, requests: Sequence[Request], slots: torch.Tensor) -> torch.Tensor:
        """Return the page table [len(requests), max_pages] of running requests in these slots."""
        for request in requests:
            version = self._cache.version(request.id)
            if self._written[request.slot] != version:
                pages = torch.tensor(self._cache.pages(request.id), dtype=torch.int32)
                row = self._table[request.slot]
                row[: len(pages)] = pages
                row[len(pages) :] = DUMMY_PAGE
                self._written[request.slot] = version
        # Not by torch's index: from some 3000 numbers on that has threads, which then spin until
        # the next step, on all cores.
        return torch.from_numpy(self._table.numpy().take(slots.numpy(), axis=0))


class SamplingInputs(TypedDict):
    """Per-row arguments of `ops.sample` that a request keeps, each [B]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    seeds: torch.Tensor


def sampling_inputs(requests: Sequence[Request], device: torch.device = _HOST) -> SamplingInputs:
    """Return how each request wants its next token sampled."""
    params = [request.sampling_params for request in requests]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), device)

    return {
        "temperature": column([p.temperature for p in params], torch.float32),
        "top_k": column([p.top_k for p in params], torch.int32),
        "top_p": column([p.top_p for p in params], torch.float32),
        "min_p": column([p.min_p for p in params], torch.float32),
        "repetition_penalty": column([p.repetition_penalty for p in params], torch.float32),
        "seeds": column([request.seed for request in requests], torch.int64),
    }


def sampling_counters(requests: Sequence[Request], device: torch.device = _HOST) -> torch.Tensor:
    """Return the place of each request's next token in its text, [B] int64."""
    return upload(torch.tensor([request.sampled for request in requests]), device)


def _distinct(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randperm(shape[0], generator=generator)


def _one_of(*values: float) -> Example:
    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]

    return draw
