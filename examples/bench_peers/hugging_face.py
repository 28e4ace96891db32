"""Hugging Face transformers: its decode step, as it is and compiled by torch.

`bench step` calls `check_peers` and `time_peers`; for the other benchmarks there is nothing here.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from ostinato.bench.graphs.hugging_face import random_hugging_face_llama, static_cache
from ostinato.bench.report import Row
from ostinato.bench.shapes import SHAPES, STEP_PEERS
from ostinato.bench.step.run import StepPlan, StepResult, StepRow
from ostinato.bench.timing import time_calls

_WARMUP = 5  # calls: torch's compiler records its graphs in the second or third


def peers(section: str, environ: Mapping[str, str]) -> list[Any]:
    """Return no implementation: a step of a whole model is no case of the harness."""
    return []


def check_peers(names: Sequence[str], shape: str) -> None:
    """Refuse peers that cannot take a model of this shape.

    Raises:
        ImportError: when transformers is not installed.
        ValueError: for a shape that is not a Llama.
    """
    if not names:
        return
    if (family := SHAPES[shape]["model_type"]) != "llama":
        raise ValueError(f"peer: got a model of family {family!r}, expected a Llama")
    import_module("transformers")


def time_peers(
    names: Sequence[str], shape: str, device: torch.device, plan: StepPlan
) -> Iterator[StepResult | str]:
    """Time transformers' decode step of a model with random weights, in bf16, with a static cache.

    A step copies one token of every sequence to the device, runs the model and takes the best
    token. The cache is as long as the context, so that nothing is padded.

    Args:
        names: of `STEP_PEERS`.
        shape: of the model.
        device: where it runs.
        plan: what to measure; its page size, temperature and breakdown are ours alone.

    Yields:
        a result for each name, context and batch, or why there is none.
    """
    gc.collect()  # what was measured before, of ours
    model = random_hugging_face_llama(shape, device)
    for name in names:
        forward = model
        if STEP_PEERS[name]:  # for CUDA graphs, as transformers itself would have it
            torch._dynamo.reset()
            forward = torch.compile(model, mode="reduce-overhead", dynamic=False)
        for context in sorted(set(plan.contexts)):
            for batch in sorted(set(plan.batches)):
                case = f"{shape} b{batch} ctx{context}"
                gc.collect()  # the cache of the case before
                try:
                    step = _step(model, forward, batch, context, device)
                    with torch.inference_mode():
                        times = time_calls(step, device, repeats=plan.repeats, warmup=_WARMUP)
                # What torch's compiler does not take is its own error, out of memory included.
                except RuntimeError as error:
                    yield f"{case} {name}: {str(error).strip().splitlines()[0]}"
                    continue
                row = _row(case, f"{name}_bf16", statistics.median(times), model, batch, context)
                yield StepResult(batch, row)


def _row(case: str, impl: str, seconds: float, model: Any, batch: int, context: int) -> StepRow:
    config = model.config
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tie_word_embeddings:  # else the output projection reads the table
        weights -= model.model.embed_tokens.weight.nbytes
    # Of a KV head: keys and values of a token in all layers, two bytes each. A query takes as many
    # multiplications and additions.
    token = 4 * config.num_hidden_layers * model.model.layers[0].self_attn.head_dim
    measured = Row.of(
        "step",
        case,
        impl,
        seconds=seconds,
        num_bytes=weights + batch * context * token * config.num_key_value_heads,
        # A weight of two bytes is multiplied and added once for each sequence.
        flops=batch * (weights + context * token * config.num_attention_heads),
    )
    return StepRow(**vars(measured), floor_us=None)


def _step(
    model: Any, forward: Any, batch: int, context: int, device: torch.device
) -> Callable[[], torch.Tensor]:
    cache = static_cache(model, batch, context)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    lengths = [layer.cumulative_length for layer in cache.layers]
    before = [torch.full_like(length, context - 1) for length in lengths]
    tokens = torch.randint(model.config.vocab_size, (batch, 1))
    if device.type == "cuda":
        tokens = tokens.pin_memory()
    inputs = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    positions = torch.full((batch, 1), context - 1, device=device)
    mask = torch.ones((batch, 1, 1, context), dtype=torch.bool, device=device)

    def step() -> torch.Tensor:
        inputs.copy_(tokens, non_blocking=True)
        # The cache counts its tokens itself: each step is the same one again.
        torch._foreach_copy_(lengths, before)
        logits = forward(
            input_ids=inputs,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return torch.as_tensor(logits[:, -1].argmax(-1))

    return step
