"""Prompts, parameters and options that are refused, each by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engines import TOKENIZER, greedy, make_engine

from ostinato.engine import Completion, Engine, SamplingParams
from ostinato.graphs import ClosedError, NotCapturedError
from tiny import tiny_llama


@pytest.mark.parametrize("token", [-1, 257, 10**9])
def test_stop_ids_outside_the_vocabulary_are_named(token: int) -> None:
    engine = make_engine()
    params = SamplingParams(stop_token_ids=(3, token))
    for call in (engine.submit, lambda prompt, params: engine.generate([prompt], params)):
        with pytest.raises(ValueError, match=f"stop_token_ids: got token id {token}, expected 0"):
            call("abc", params)
    assert engine.idle


def test_prompts_are_refused_before_any_is_served() -> None:
    engine = make_engine(max_context=16, num_pages=4, max_batch=1)
    params = SamplingParams(max_tokens=4)
    for prompts, match in (
        ([], "prompts: got none, expected at least one"),
        (["ok", ""], "prompt: got no tokens"),
        (["ok", "0123456789abcdef"], "got 16 tokens, expected fewer than max_context = 16"),
        (["ok", "0123456789abc"], "13 tokens, which with 3 more need 4 pages; .* cache's 3"),
        ([[1, 257]], "prompt: got token id 257, expected 0 to 256"),
        ([[-1]], "prompt: got token id -1"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.generate(prompts, params)
        assert engine.idle
    for prompts, match in (
        ("abc", "prompts: got one string"),
        (None, "prompts: got NoneType"),
        ([1, 2, 3], "prompt: got 1, expected a text"),
        ([b"abc"], "prompt: got b'abc', expected a text"),
        ([[1.5]], "prompt: got 1.5, expected an integer"),
        ([["1"]], "prompt: got '1', expected an integer"),
    ):
        with pytest.raises(TypeError, match=match):
            engine.generate(prompts, params)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampling_params: got None, expected SamplingParams"):
        engine.generate(["a"], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling_params: got 2, expected one or 1"):
        engine.generate(["a"], [params, params])
    with pytest.raises(ValueError, match=r"prompt: got a text with '\\ud800', expected valid Unic"):
        engine.submit("a\ud800b", params)


@pytest.mark.parametrize("params", [{}, "", 5, [SamplingParams()]], ids=repr)
def test_parameters_of_another_kind_are_named(params: Any) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match=r"sampling_params: got .*, expected SamplingParams"):
        engine.submit("a", params)
    with pytest.raises(TypeError, match=r"sampling_params: got .*, expected SamplingParams"):
        engine.generate(["a"], [params])
    assert engine.idle


@pytest.mark.parametrize("call", ["cancel", "result"])
@pytest.mark.parametrize("request_id", [[], "0", None, True], ids=repr)
def test_ids_of_another_kind_are_named(call: str, request_id: Any) -> None:
    engine = make_engine()
    for _ in range(2):
        engine.submit("a")
    with pytest.raises(TypeError, match=r"request_id: got .*, expected an integer"):
        getattr(engine, call)(request_id)


def test_a_closed_engine_takes_no_requests() -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(ClosedError, match="the engine is closed"):
        engine.submit("a")
    assert engine.idle


@pytest.mark.parametrize("integer", [torch.tensor, np.int64, np.uint8], ids=lambda i: i.__name__)
def test_sizes_are_integers_of_any_library_and_stay_as_they_are(
    integer: Callable[[int], Any],
) -> None:
    plain = {"max_batch": 4, "page_size": 4, "prefill_chunk": 8, "max_context": 60}
    plain |= {"max_prefill_tokens": 16, "num_pages": 61}
    given = {name: integer(value) for name, value in plain.items()}
    prompts = ["a prompt of many more tokens than a chunk"] * 4
    params = SamplingParams(max_tokens=6)
    texts, steps = [], []
    for options in (plain, given):
        engine = make_engine(**options)
        for prompt in prompts:
            engine.submit(prompt, params)
        events, count = [], 0
        while not engine.idle:
            events += engine.step()
            count += 1
        texts.append([event.text for event in events])
        steps.append(count)
    assert texts[0] == texts[1]
    assert steps[0] == steps[1]
    assert {name: int(value) for name, value in given.items()} == plain


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("max_batch", 0, "max_batch: got 0, expected at least 1"),
        ("page_size", 0, "page_size: got 0, expected at least 1"),
        ("max_prefill_tokens", 0, "max_prefill_tokens: got 0"),
        ("max_context", 1, "max_context: got 1, expected 2 to the model's 128"),
        ("max_context", 129, "max_context: got 129, expected 2 to the model's 128"),
        ("prefill_chunk", 6, "prefill_chunk: got 6, expected a multiple of page_size=4"),
        ("prefill_chunk", 0, "prefill_chunk: got 0"),
        ("num_pages", 1, "num_pages: got 1, expected at least 2"),
        ("kv_cache_dtype", "e5m2", "kv_cache_dtype: got 'e5m2', expected one of 'auto', 'bf16',"),
        ("kv_cache_dtype", 8, "kv_cache_dtype: got 8, expected one of 'auto'"),
        ("kv_cache_dtype", "bf16", "kv_cache_dtype: got 'bf16', expected .* the model's 'fp32'"),
        ("kv_scales", "head", "kv_scales: got 'head', expected None, 'static' or 'token'"),
        ("kv_scales", "token", "kv_scales: got 'token', expected None for pages of torch.float32"),
    ],
)
def test_engine_options_out_of_range_are_named(option: str, value: object, match: str) -> None:
    options: dict[str, Any] = {"max_batch": 4, "page_size": 4, option: value}
    with pytest.raises(ValueError, match=match):
        Engine(tiny_llama(), TOKENIZER, **options)


@pytest.mark.parametrize(
    "option", ["max_batch", "page_size", "max_context", "num_pages", "prefill_chunk"]
)
def test_engine_options_of_the_wrong_type_are_named(option: str) -> None:
    with pytest.raises(TypeError, match=f"{option}: got 16.0, expected an integer"):
        Engine(tiny_llama(), TOKENIZER, **{option: 16.0})


def test_serving_before_capture_is_refused_and_loses_nothing() -> None:
    engine = Engine(tiny_llama(), TOKENIZER, max_batch=2, page_size=4, prefill_chunk=8)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    request = engine.submit("abc", params)
    with pytest.raises(NotCapturedError):
        engine.step()
    with pytest.raises(NotCapturedError):
        engine.generate(["abc"], params)
    engine.capture([1], progress=False)
    while not engine.idle:
        engine.step()
    completion = engine.result(request)
    assert isinstance(completion, Completion)
    assert completion.token_ids == greedy(engine, "abc", 3)


def test_ids_of_no_live_or_finished_request_are_refused() -> None:
    engine = make_engine()
    request = engine.submit("abc", SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="expected that of a finished request"):
        engine.result(request)
    engine.cancel(request)
    with pytest.raises(ValueError, match="expected that of a live request"):
        engine.cancel(request)
    engine.result(request)
    with pytest.raises(ValueError, match="expected that of a finished request"):
        engine.result(request)
    with pytest.raises(ValueError, match="got 99, expected that of a live request"):
        engine.cancel(99)
