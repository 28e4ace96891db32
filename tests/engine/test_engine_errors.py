"""Errors of a step, of the tokenizer and of logits: what they end, and what goes on."""

from __future__ import annotations

import itertools

import pytest
import torch
from engines import TOKENIZER, failing_once, greedy, make_engine, step_until_idle

from ostinato import ops
from ostinato.engine import FinishReason, SamplingParams
from ostinato.engine import decode_step as decode_module
from ostinato.engine.decode_step import sampling_inputs
from ostinato.engine.detokenizer import Detokenizer
from tiny import tiny_llama


def test_logits_that_become_nan_end_the_text_there() -> None:
    expected = greedy(make_engine(), "abc", 8)
    broken = tiny_llama()
    embedding = next(tensor for tensor in broken.tensors() if tensor.shape[0] == 257)
    embedding[expected[3]] = torch.nan
    first = expected.index(expected[3])
    engine = make_engine(model=broken)
    request = engine.submit("abc", SamplingParams(max_tokens=8, ignore_eos=True))
    events, errors = step_until_idle(engine)
    assert errors == 0
    assert [event.token_id for event in events] == [*expected[: first + 1], None]
    assert events[-1].finish_reason is FinishReason.ERROR
    completion = engine.result(request)
    assert completion.token_ids == expected[: first + 1]
    assert completion.text == "".join(event.text for event in events)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_in_a_step_leaves_the_engine_usable(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = greedy(engine, "abc", 8)

    def fail(*_: object) -> None:
        raise error

    stream = engine.stream(["abc", "xyz"], SamplingParams(max_tokens=8, ignore_eos=True))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", fail)
        with pytest.raises(error):
            list(stream)
    assert engine.idle
    assert engine.cache.free_pages == engine.cache.usable_pages
    assert greedy(engine, "abc", 8) == expected


def test_tokens_before_an_error_in_a_step_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    first = engine.submit("first", params)
    events = engine.step()
    second = engine.submit("second", params)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._prefill, "compute", fail)
        with pytest.raises(MemoryError):
            engine.step()
    while not engine.idle:
        events += engine.step()
    for request in (first, second):
        tokens = tuple(e.token_id for e in events if e.request_id == request)
        assert tokens == engine.result(request).token_ids
        assert len(tokens) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_while_tokens_are_read_loses_none_of_the_others(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = [greedy(engine, prompt, 6) for prompt in ("first", "second")]
    ids = [engine.submit(prompt, params) for prompt in ("first", "second")]
    events = [event for _ in range(3) for event in engine.step()]

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "push", fail)
        with pytest.raises(error):
            engine.step()
    while not engine.idle:
        events += engine.step()
    assert [engine.result(i).token_ids for i in ids] == expected
    for request, tokens in zip(ids, expected, strict=True):
        assert tuple(e.token_id for e in events if e.request_id == request) == tokens


def test_an_error_in_first_sampling_computes_the_prompt_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    expected = greedy(engine, "abc", 4)
    request = engine.submit("abc", SamplingParams(max_tokens=4, ignore_eos=True))

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ops, "sample", fail)
        with pytest.raises(MemoryError):
            engine.step()
    while not engine.idle:
        engine.step()
    assert engine.result(request).token_ids == expected


@pytest.mark.parametrize("turn", range(1, 15))
def test_an_error_of_the_tokenizer_loses_no_token(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_batch=1)
    expected = greedy(engine, "abc", 4)
    request = engine.submit("abc", SamplingParams(max_tokens=4, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "_decode", failing_once(Detokenizer._decode, turn))
        events, errors = step_until_idle(engine)
    assert errors <= 1
    assert tuple(event.token_id for event in events) == expected
    assert engine.result(request).text == TOKENIZER.decode(list(expected))
    assert greedy(engine, "abc", 4) == expected


def test_a_request_is_cancelled_if_its_text_cannot_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(max_batch=1)
    expected = greedy(engine, "abc", 4)
    request = engine.submit("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    stream = engine.stream(["other"], SamplingParams())
    engine.step()
    monkeypatch.setattr(Detokenizer, "finish", failing_once(Detokenizer.finish))
    with pytest.raises(MemoryError):
        engine.cancel(request)
    assert engine.result(request).finish_reason is FinishReason.CANCELLED
    monkeypatch.setattr(Detokenizer, "finish", failing_once(Detokenizer.finish))
    with pytest.raises(MemoryError):
        stream.close()
    step_until_idle(engine)
    assert greedy(engine, "abc", 4) == expected


def test_an_error_in_admission_leaves_no_tokens_in_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, repetition_penalty=1.5)
    expected = [make_engine().generate([prompt], params)[0].token_ids for prompt in ("abc", "def")]
    engine = make_engine()
    engine.generate(["the quick brown fox"], params)
    requests = [engine.submit(prompt, params) for prompt in ("abc", "def")]
    monkeypatch.setattr(engine.cache, "add", failing_once(engine.cache.add, 2))
    assert step_until_idle(engine)[1] == 1
    assert [engine.result(request).token_ids for request in requests] == expected


@pytest.mark.parametrize("turn", [1, 2])
def test_an_error_after_first_tokens_samples_none_again(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
    prompts = ["123456789", "abcdefghi"]
    expected = [c.token_ids for c in make_engine().generate(prompts, params)]
    engine = make_engine()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    monkeypatch.setattr(engine.cache, "publish", failing_once(engine.cache.publish, turn))
    step_until_idle(engine)
    assert [engine.result(request).token_ids for request in requests] == expected


def test_an_error_in_making_inputs_keeps_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = greedy(engine, "abc", 20)
    first = engine.submit("abc", params)
    for _ in range(3):
        engine.step()
    second = engine.submit("def", params)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(decode_module, "sampling_inputs", failing_once(sampling_inputs))
        with pytest.raises(MemoryError):
            engine.step()
    engine.cancel(second)
    assert step_until_idle(engine)[1] == 0
    assert engine.result(first).token_ids == expected


def test_a_dropped_stream_is_cancelled_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    stream = engine.stream(["a", "b", "c"], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    finish, calls = Detokenizer.finish, itertools.count()

    def fail_once(text: Detokenizer) -> str:
        if next(calls) == 0:
            raise MemoryError
        return finish(text)

    monkeypatch.setattr(Detokenizer, "finish", fail_once)
    del stream
    with pytest.raises(MemoryError):
        engine.step()
    assert engine.step() == []
    assert engine.idle
    assert next(calls) == 3
    assert engine.cache.free_pages == engine.cache.usable_pages
