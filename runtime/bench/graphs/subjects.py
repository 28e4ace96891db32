"""The steps that the graph manager is measured with: ours, and that of transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache as memoised
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ostinato.graphs import BatchView, BufferSpec, StaticBuffers
from ostinato.graphs.declared_memory import DeclaredMemory
from ostinato.graphs.outputs import Step

from ...engine.capture_examples import CaptureExamples
from ...engine.decode_step import DecodeStep, SeenTokens
from ...models import PagedKVCache, compile_kernels, read_config
from ...ops.common.sizes import round_up
from ..shapes import SHAPES
from ..step.run import StepPlan, step_inputs
from ..weights import random_decoder
from .hugging_face import Attention, random_hugging_face_llama, static_cache

_PAGE_SIZE = 16
# On an H200 cuDNN's attention (9.19, torch 2.11), which torch would take, gave other bits than at
# first in 299 of 300 calls with the same inputs, this one in none
# (docs/results/h200/texts/hf-step.txt). The second is for a CPU.
_REPEATABLE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


Tiles: TypeAlias = Literal["ours", "library", "rows"]


@dataclass(frozen=True)
class Subject:
    """A step to capture.

    Attributes:
        name: of it, in results.
        step, buffers, memory: what a `GraphRunner` is made of.
        inputs: returns a batch's, on the CPU.
        capture_examples: a context in which the buffers' examples name places that hold nothing of
            value.
        tiles: where padding rows share tiles with real ones. `ours`: where our GEMMs' tiles say so.
            `library`: where graphs of the two batch sizes hold the same kernels, since the products
            are another library's, which says what its tiles are by its kernels' names alone.
            `rows`: nowhere. Torch's attention has tiles for each row and reads all places of a
            static cache for it, real or not.
    """

    name: str
    step: Step
    buffers: StaticBuffers
    memory: DeclaredMemory
    inputs: Callable[[int], dict[str, torch.Tensor]]
    capture_examples: Callable[[], AbstractContextManager[None]] = nullcontext
    tiles: Tiles = "ours"


def our_step(
    shape: str, precision: str, device: torch.device, *, max_batch: int, context: int
) -> Subject:
    """Return the engine's decode step of a model with random weights.

    Args:
        shape: one of `SHAPES`.
        precision: of the linear layers.
        device: where it runs.
        max_batch: the largest batch.
        context: tokens of each sequence in the KV cache, the step's included.

    Raises:
        ValueError: for another shape or precision, or a context that the model does not have.
    """
    model = random_decoder(read_config(SHAPES[shape]), precision, device, max_context=context)
    compile_kernels(model)
    pages_each = -(-context // _PAGE_SIZE)
    cache = PagedKVCache.for_model(
        model.config,
        num_pages=1 + max_batch * pages_each,
        page_size=_PAGE_SIZE,
        device=device,
    )
    cache.randomize()
    seen = SeenTokens(max_batch, model.config.vocab_size, device)
    capture_examples = CaptureExamples(cache, pages_each + max_batch)
    step = DecodeStep(model, cache, seen, max_pages=pages_each, capture_examples=capture_examples)
    specs = step.buffer_specs()

    @memoised  # again, freed pages would come in another order
    def inputs(batch: int) -> dict[str, torch.Tensor]:
        plan = StepPlan([batch], [context], _PAGE_SIZE)
        made = step_inputs(cache, model, batch, context, plan)
        return {name: tensor.to(specs[name].dtype) for name, tensor in made.items()}

    return Subject(
        f"{shape} {precision} ctx{context}",
        step,
        StaticBuffers(specs, max_batch, device),
        {
            "weights": list(model.tensors()),
            "cache": cache.tensors(),
            "seen": [value for value in vars(seen).values() if isinstance(value, torch.Tensor)],
        },
        inputs,
        capture_examples.lent,
    )


def hugging_face_step(
    shape: str,
    device: torch.device,
    *,
    max_batch: int,
    context: int,
    attention: Attention = "ostinato",
    num_layers: int | None = None,
) -> Subject:
    """Return a decode step of transformers' Llama in bf16, with random weights and a static cache.

    Args:
        shape: one of `SHAPES` that is a Llama.
        device: where it runs.
        max_batch: the largest batch.
        context: tokens of each sequence in the static cache, the step's included.
        attention: what the model attends by: ours, with a `RaggedStaticCache`, `replace_norms` and
            `replace_attention`, which is what a user of `compat.transformers` gets, or torch's,
            with transformers' `StaticCache`, norms and RoPE. Torch's is given to a kernel that
            repeats its results bit for bit; the one that torch prefers, cuDNN's, does not.
        num_layers: of the model; by default all, and otherwise the subject's name says so.

    Raises:
        ImportError: when transformers is not installed.
    """
    model = random_hugging_face_llama(shape, device, attention=attention, num_layers=num_layers)
    ours = attention == "ostinato"
    attend = _ragged_step if ours else _static_step
    step, memory, padding = attend(model, device, max_batch, context)

    def random_tokens(generator: torch.Generator, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(model.config.vocab_size, size, generator=generator)

    def full(generator: torch.Generator, size: tuple[int, ...]) -> torch.Tensor:
        return torch.full(size, context, dtype=torch.int32)

    specs = {
        "tokens": BufferSpec((), torch.int64, 0, random_tokens),
        "seq_lens": BufferSpec((), torch.int32, padding, full),
    }

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {name: draw(generator, (batch,)) for name, draw in examples.items()}

    examples = {"tokens": random_tokens, "seq_lens": full}
    name = "transformers" if ours else "transformers_sdpa"
    count = "" if num_layers is None else f", {num_layers} layers"
    return Subject(
        f"{name} {shape} bf16 ctx{context}{count}",
        step,
        StaticBuffers(specs, max_batch, device),
        {"weights": model, **memory},
        inputs,
        tiles="library" if ours else "rows",
    )


def _ragged_step(
    model: Any, device: torch.device, max_batch: int, context: int
) -> tuple[Step, DeclaredMemory, int]:
    """Return a step whose rows have lengths of their own, its memory, and padding's length."""
    from ...compat.transformers import RaggedStaticCache, replace_attention, replace_norms

    replace_norms(model)
    replace_attention(model)
    cache = RaggedStaticCache(model, max_batch, context)

    def step(batch: BatchView) -> dict[str, torch.Tensor]:
        rows = cache.rows(batch.seq_lens)
        logits = model(
            batch.tokens[:, None], past_key_values=rows, position_ids=rows.position_ids
        ).logits[:, -1]
        return {"tokens": logits.argmax(-1), "logits": logits}

    return step, {"cache": cache.tensors()}, 0


def _static_step(
    model: Any, device: torch.device, max_batch: int, context: int
) -> tuple[Step, DeclaredMemory, int]:
    """Return a step with a `StaticCache`, its memory, and padding's length."""
    config = model.config
    layers = config.num_hidden_layers
    heads, head_dim = config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    # Torch's masks are then aligned. A batch of padding writes to the last place, in all rows, and
    # no sequence has it.
    places = round_up(context + 1, _PAGE_SIZE)
    storage = torch.zeros(
        (layers, 2, max_batch, heads, places, head_dim), dtype=torch.bfloat16, device=device
    )
    lengths = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(layers)]
    positions = torch.arange(places, device=device)
    caches: dict[int, Any] = {}

    def cache_of(batch: int) -> Any:
        """Return a cache over the first rows of the storage, which all batch sizes share."""
        if batch not in caches:
            cache = static_cache(model, 1, places)
            for index, layer in enumerate(cache.layers):
                layer.keys, layer.values = storage[index, 0, :batch], storage[index, 1, :batch]
                layer.batch_size, layer.cumulative_length = batch, lengths[index]
            caches[batch] = cache
        return caches[batch]

    def step(batch: BatchView) -> dict[str, torch.Tensor]:
        last = batch.seq_lens - 1
        # The cache counts its tokens itself; to be repeatable, the step says where they end.
        torch._foreach_copy_(lengths, [last[0]] * layers)
        with sdpa_kernel(_REPEATABLE):
            logits = model(
                batch.tokens[:, None],
                attention_mask=(positions <= last[:, None])[:, None, None],
                position_ids=last[:, None],
                past_key_values=cache_of(batch.size),
            ).logits[:, -1]
        return {"tokens": logits.argmax(-1), "logits": logits}

    memory: DeclaredMemory = {"cache": storage, "lengths": lengths, "positions": positions}
    return step, memory, places
