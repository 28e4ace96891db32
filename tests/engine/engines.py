"""Small engines of random models on byte tokens, and how tests drive them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ostinato.engine import Engine, SamplingParams, TokenEvent
from ostinato.models import Decoder
from tiny import KV_CACHES, byte_tokenizer, tiny_llama

TOKENIZER = byte_tokenizer()


SCHEMES = ("plain", "int8", "fp8")


def make_engine(
    device: torch.device | str = "cpu",
    scheme: str = "plain",
    batch_sizes: Sequence[int] | None = None,
    model: Decoder | None = None,
    cache: str = "model",
    **options: Any,
) -> Engine:
    defaults: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_chunk": 8}
    options = {**defaults, **KV_CACHES[cache], **options}
    engine = Engine(model or tiny_llama(device, scheme, cache=cache), TOKENIZER, **options)
    engine.capture(batch_sizes, progress=False)
    return engine


def greedy(engine: Engine, prompt: str, count: int) -> tuple[int, ...]:
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))
    return completion.token_ids


def failing_once(function: Callable[..., Any], turn: int = 1) -> Callable[..., Any]:
    """Return the function, raising MemoryError in its `turn`-th call."""
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == turn:
            raise MemoryError
        return function(*args, **kwargs)

    return call


def step_until_idle(engine: Engine, steps: int = 100) -> tuple[list[TokenEvent], int]:
    """Return the events of all steps, and how many of these raised MemoryError."""
    events, errors = [], 0
    for _ in range(steps):
        if engine.idle:
            break
        try:
            events += engine.step()
        except MemoryError:
            errors += 1
    assert engine.idle
    assert engine.cache.free_pages == engine.cache.usable_pages
    return events, errors
