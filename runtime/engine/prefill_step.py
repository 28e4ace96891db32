"""Computing prompts: chunks of several requests at once, from graphs captured by their tokens.

Texts decode a token more in the same call, so that steps with prompts read the weights once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.graphs import (
    BatchView,
    BufferSpec,
    CaptureReport,
    GraphRunner,
    StaticBuffers,
    Variant,
)
from ostinato.graphs.declared_memory import DeclaredMemory

from .. import ops
from ..models import AttentionInputs, Decoder, PagedKVCache
from .capture_examples import CaptureExamples, integers
from .decode_step import DecodeRows, SeenTokens
from .engine_sizes import EngineSizes
from .logprobs import MOST_LOGPROBS, HostLogprobs
from .prefill_batch import PrefillBatch, TextBatch
from .scheduler import PrefillChunk
from .upload import upload

PREFILL = Variant(name="prefill")  # what a report calls these graphs
_FEWEST = 128  # tokens
_LOGITS_ROWS = 128  # of a prompt whose logits are in memory at once
_LONGEST_EXAMPLE = 2048  # tokens: what is verified shall not take longer where contexts are long


def prefill_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens that are captured: 128, 256, 384 ... 2048, 2560, 3072 ... most.

    A step takes the time of the next of these, most of which is that of multiplying weights by as
    many rows. Steps beside texts have a quarter of `most` at most and are by far the most frequent:
    up to there sizes are an eighth apart, or 128; beyond it a quarter, since each one takes its
    time when a server starts.
    """
    sizes = []
    for size in (_FEWEST << i for i in range(most.bit_length())):
        parts = min(8 if 4 * size < most else 4, size // _FEWEST)
        sizes += [size + size * part // parts for part in range(parts)]
    # One that is hardly smaller than the largest would save next to nothing.
    return (*(size for size in sizes if 8 * size <= 7 * most), most)


class PrefillStep:
    """A step function for `GraphRunner`, with a row for each token: embed and decode, sample not.

    The rows of texts, one each, come before those of prompts. Outputs `x` and `residual`,
    [tokens, hidden_size] each, for `Decoder.logits`.

    Args:
        model, cache: what the step runs on.
        seen: where the tokens of texts are marked.
        text_batch: the texts.
        prefill_batch: whose tokens the others are.
        max_chunk: tokens of the largest chunk.
        max_tokens_k: of the sequences that a call computes, as of `ops.paged_attention`.
        capture_examples: where the examples of a verification read and write.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        seen: SeenTokens,
        text_batch: TextBatch,
        prefill_batch: PrefillBatch,
        max_chunk: int,
        max_tokens_k: int | None,
        capture_examples: CaptureExamples,
    ) -> None:
        self._model = model
        self._cache = cache
        self._seen = seen
        self._text_batch = text_batch
        self._prefill_batch = prefill_batch
        self._max_chunk = max_chunk
        self._max_tokens_k = max_tokens_k
        self._capture_examples = capture_examples

    def buffer_specs(self) -> dict[str, BufferSpec]:
        """Return the inputs of each token; padding belongs to no sequence and writes to no slot."""
        vocab_size, length = self._model.config.vocab_size, self._model.max_context
        return {
            "tokens": BufferSpec((), torch.int64, 0, integers(0, vocab_size)),
            "positions": BufferSpec((), torch.int32, 0, integers(0, length)),
            "slot_mapping": BufferSpec((), torch.int64, -1, self._capture_examples.slot_mapping),
            # Tokens of prompts are marked when a request gets its slot.
            "slots": BufferSpec(
                (), torch.int64, self._seen.padding_slot, integers(0, self._seen.padding_slot + 1)
            ),
        }

    def memory(self) -> DeclaredMemory:
        """Return what the step works on besides its buffers, for `GraphRunner(memory=...)`."""
        return {
            "model": tuple(self._model.tensors()),
            "cache": self._cache.tensors(),
            "seen": self._seen.mask,
            "text_batch": self._text_batch.memory,
            "prefill_batch": self._prefill_batch.memory,
        }

    def __call__(self, batch: BatchView) -> dict[str, torch.Tensor]:
        """Run the step over a batch of the buffers above."""
        # With fewer tokens than there may be sequences some of these have none.
        views = self._prefill_batch.first(batch.size)
        attention = AttentionInputs(
            slot_mapping=batch.slot_mapping,
            page_table=views.page_table,
            seq_lens=views.seq_lens,
            # Whatever was written there last, no sequence has rows that are padding.
            cu_seqlens_q=torch.minimum(views.cu_seqlens, batch.n_active),
            # The capacity, not this call's maximum: shapes must not depend on the neighbours.
            max_seqlen_q=self._max_chunk,
            max_tokens_k=self._max_tokens_k,
            texts=self._text_batch.first(batch.size),
        )
        x, residual = self._model.hidden(
            *(batch.tokens, batch.positions, attention, self._cache),
            n_active=batch.n_active,
            seen=self._seen.rows(batch.slots),
        )
        return {"x": x, "residual": residual}


class Prefill:
    """Appends chunks of prompts, and tokens of texts, to the cache.

    On a CPU, where there are no launches to save, nothing is captured: the step is called on just
    the tokens there are.

    Args:
        model, cache: what it runs on.
        seen: where the tokens of texts are marked.
        sizes: of the engine.
        max_chunk: tokens of the largest chunk.
        capture_examples: as of `PrefillStep`.
        group: of `GraphRunner`.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        seen: SeenTokens,
        *,
        sizes: EngineSizes,
        max_chunk: int,
        capture_examples: CaptureExamples,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._max_pages = sizes.max_pages
        self._padding_slot = seen.padding_slot
        self._max_tokens = sizes.max_tokens
        self._max_tokens_k = sizes.max_tokens_k
        self._max_chunk = max_chunk
        self._capture_examples = capture_examples
        # To attention each chunk is a sequence, which ends where the chunk does: so it does not
        # matter to the bits of a prompt whether its chunks are computed together.
        most = min(sizes.max_chunks, sizes.max_tokens)
        self._prefill_batch = PrefillBatch(most, sizes.max_pages, model.device)
        self._text_batch = TextBatch(sizes.max_batch, sizes.max_pages, model.device)
        self._step = PrefillStep(
            *(model, cache, seen, self._text_batch, self._prefill_batch),
            *(max_chunk, sizes.max_tokens_k, capture_examples),
        )
        self._runner: GraphRunner[dict[str, torch.Tensor]] | None = None
        if model.device.type != "cpu":
            buffers = StaticBuffers(self._step.buffer_specs(), sizes.max_tokens, model.device)
            self._runner = GraphRunner(self._step, buffers, memory=self._step.memory(), group=group)

    def capture(self, *, progress: bool, verify: bool, wakes: bool = False) -> CaptureReport | None:
        """Capture the step for a few numbers of tokens; see `GraphRunner.capture`.

        Verification needs the pages of `CaptureExamples`. None where nothing is to be captured.

        Args:
            progress: of `GraphRunner.capture`.
            verify: likewise.
            wakes: repeat the last capture, after `sleep`.
        """
        if self._runner is None:
            return None
        if verify:
            self._write_examples()
        if wakes:
            return self._runner.wake(progress=progress, verify=verify)
        sizes = {PREFILL: prefill_sizes(self._max_tokens)}
        return self._runner.capture(sizes, progress=progress, verify=verify)

    def _write_examples(self) -> None:
        """Write texts, and sequences of chunks of many sizes, each at the end of some tokens."""
        generator = torch.Generator().manual_seed(0)
        count = self._prefill_batch.most
        capacity = self._max_pages * self._cache.page_size
        longest = min(capacity, _LONGEST_EXAMPLE)
        # Both are in each graph.
        texts = min(self._text_batch.most, prefill_sizes(self._max_tokens)[0] // 2)
        self._text_batch.write(
            torch.randint(1, longest + 1, (texts,), generator=generator).int(),
            self._capture_examples.page_table(generator, (texts, self._max_pages)).int(),
        )
        missing = self._max_tokens - texts
        largest = min(self._max_chunk, longest)
        rows = (largest ** torch.rand(count, generator=generator)).int()
        # Each token belongs to one of them.
        missing = max(0, missing - int(rows.sum()))
        for last in range(count - 1, -1, -1):
            more = min(missing, largest - int(rows[last]))
            rows[last] += more
            missing -= more
        before = (torch.rand(count, generator=generator) * (longest - rows + 1)).int()
        if self._max_tokens_k is not None:
            # The first of these, as far as there is room beside the rows; those of sequences that
            # begin behind the last token do not count.
            counted = rows[texts + rows.cumsum(0) - rows < self._max_tokens]
            room = self._max_tokens_k - int(counted.sum())
            before = before.where(before.cumsum(0) <= room, 0)
        self._prefill_batch.write(
            [texts, *(texts + rows.cumsum(0)).tolist()],
            (before + rows).tolist(),
            self._capture_examples.page_table(generator, (count, self._max_pages)).int(),
        )

    def require_captured(self) -> None:
        """Raise what `compute` would raise now if something must be captured first."""
        if self._runner is not None:
            self._runner.require_captured()

    def sleep(self) -> None:
        """Release the captured graphs until `capture(wakes=True)`."""
        if self._runner is not None:
            self._runner.sleep()

    def close(self) -> None:
        """Release the captured graphs."""
        if self._runner is not None:
            self._runner.close()

    def compute(
        self, chunks: Sequence[PrefillChunk], texts: DecodeRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute chunks and texts, and return what logits are of, [R, hidden_size] each.

        Their rows are those of each text, then of each prompt that ends. Chunks of one prompt come
        in their order.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        beside = len(texts.positions)
        cu_seqlens = [beside]
        last_rows = list(range(beside))
        for chunk in chunks:
            tokens += chunk.request.prompt[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            slots += self._cache.slots(chunk.request.id, chunk.start, chunk.stop)
            cu_seqlens.append(beside + len(tokens))
            if chunk.ends_prompt:
                last_rows.append(beside + len(tokens) - 1)
        self._text_batch.write(texts.seq_lens, texts.page_table)
        self._prefill_batch.write(
            cu_seqlens,
            [chunk.stop for chunk in chunks],
            self._cache.page_table([chunk.request.id for chunk in chunks], self._max_pages),
        )
        new = torch.tensor(tokens)
        inputs = {
            # Those of texts may not have been read yet.
            "tokens": torch.cat([texts.tokens, upload(new, texts.tokens.device)]),
            "positions": torch.cat([texts.positions, torch.tensor(positions, dtype=torch.int32)]),
            "slot_mapping": torch.cat([texts.slot_mapping, torch.tensor(slots)]),
            "slots": torch.cat([texts.slots, torch.full_like(new, self._padding_slot)]),
        }
        hidden = self._run(beside + len(tokens), inputs)
        self._text_batch.used()
        self._prefill_batch.used()
        for chunk, first in zip(chunks, cu_seqlens, strict=False):
            if chunk.request.sampling_params.prompt_logprobs is not None:
                chunk.request.prompt_rows[chunk.start] = self._prompt_rows(chunk, first, hidden)
        rows = upload(torch.tensor(last_rows, dtype=torch.int64), self._model.device)
        return hidden["x"][rows], hidden["residual"][rows]

    def _prompt_rows(
        self, chunk: PrefillChunk, first: int, hidden: dict[str, torch.Tensor]
    ) -> list[HostLogprobs]:
        """Return log-probabilities of the tokens behind each of a chunk.

        Its rows begin at `first`, and blocks of them there, too: so their bits do not depend on
        what is beside the chunk.
        """
        device, found = self._model.device, []
        wanted = upload(
            torch.tensor([chunk.request.sampling_params.prompt_logprobs], dtype=torch.int32), device
        )
        followers = chunk.request.prompt[chunk.start + 1 : chunk.stop + 1]
        for at in range(0, len(followers), _LOGITS_ROWS):
            tokens = upload(torch.tensor(followers[at : at + _LOGITS_ROWS]), device)
            rows = slice(first + at, first + at + len(tokens))
            logits = self._model.logits(hidden["x"][rows], hidden["residual"][rows])
            found.append(
                HostLogprobs(
                    ops.token_logprobs(
                        logits,
                        tokens,
                        wanted=wanted,
                        slots=torch.zeros_like(tokens),
                        most=MOST_LOGPROBS,
                    )
                )
            )
        return found

    def _run(self, count: int, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the step on so many tokens."""
        if self._runner is not None:
            return self._runner.run(count, inputs, variant=PREFILL)
        n_active = torch.tensor([count], dtype=torch.int32)
        with torch.no_grad():
            return self._step(BatchView(inputs, count, n_active))
