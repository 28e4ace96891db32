"""The engine end to end: texts, events, streams, ends and limits."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import SCHEMES, TOKENIZER, greedy, make_engine

from ostinato.engine import Engine, FinishReason, SamplingParams, TokenEvent
from ostinato.models import sequence_logits
from tiny import byte_tokenizer, tiny_llama


@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_text_follows_the_largest_logit(scheme: str, device: torch.device) -> None:
    engine = make_engine(device, scheme)
    prompts = ["a", "some prompt", "a prompt longer than a chunk of eight"]
    for completion in engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True)):
        prompt = TOKENIZER.encode(prompts[completion.request_id]).ids
        for count, token in enumerate(completion.token_ids):
            logits = sequence_logits(engine.model, [*prompt, *completion.token_ids[:count]])[-1]
            # Ties within rounding may go either way when the prompt is computed in one go.
            assert logits[token] >= logits.max() - 1e-3
        assert completion.text == TOKENIZER.decode(list(completion.token_ids))
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.prompt_tokens == len(prompt)


def test_events_add_up_to_the_completions() -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    prompts = ["one", "two", "three", "four", "five", "six"]
    engine = make_engine()
    completions = engine.generate(prompts, params)
    texts = [""] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    ends: list[FinishReason | None] = [None] * len(prompts)
    for event in engine.stream(prompts, params):
        assert ends[event.request_id] is None
        assert event.token_id is not None
        texts[event.request_id] += event.text
        tokens[event.request_id].append(event.token_id)
        ends[event.request_id] = event.finish_reason
    assert texts == [c.text for c in completions]
    assert [tuple(t) for t in tokens] == [c.token_ids for c in completions]
    assert ends == [c.finish_reason for c in completions]
    assert engine.idle


def test_more_requests_than_slots_are_served_in_order() -> None:
    engine = make_engine(max_batch=4, batch_sizes=[1, 2])
    prompts = [f"{i}" for i in range(11)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    completions = engine.generate(prompts, params)
    alone = [make_engine(max_batch=1).generate([p], params)[0] for p in prompts]
    assert [c.token_ids for c in completions] == [c.token_ids for c in alone]


def test_the_reported_seed_reproduces_the_sampling() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)
    first, second = engine.generate(["same", "same"], params)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    (again,) = engine.generate(["same"], replace(params, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_stop_token_ends_the_text() -> None:
    engine = make_engine()
    tokens = greedy(engine, "abc", 12)
    stop = tokens[5]
    (completion,) = engine.generate(["abc"], SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == tokens[: tokens.index(stop) + 1]
    assert completion.text == TOKENIZER.decode(list(tokens[: tokens.index(stop)]))


def test_the_end_token_ends_the_text_unless_ignored() -> None:
    base = make_engine()
    tokens = greedy(base, "abc", 12)
    eos = tokens[3]
    model = tiny_llama(eos_token_ids=(eos,))
    engine = make_engine(model=model)
    (completion,) = engine.generate(["abc"], SamplingParams(max_tokens=12))
    assert completion.token_ids == tokens[: tokens.index(eos) + 1]
    assert completion.text == TOKENIZER.decode(list(tokens[: tokens.index(eos)]))
    assert greedy(engine, "abc", 12) == tokens


def test_an_end_token_never_shows() -> None:
    """Though this tokenizer does not call it special, and it is ignored."""
    tokens = greedy(make_engine(), "abc", 12)
    eos = tokens[3]
    engine = make_engine(model=tiny_llama(eos_token_ids=(eos,)))
    with engine.stream(["abc"], SamplingParams(max_tokens=12, ignore_eos=True)) as stream:
        streamed = "".join(event.text for event in stream)
        (completion,) = stream.completions
    assert completion.token_ids == tokens
    assert streamed == completion.text
    assert completion.text == TOKENIZER.decode([token for token in tokens if token != eos])


def test_a_stop_string_may_be_a_special_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model=tiny_llama(eos_token_ids=()))
    tokens = greedy(engine, "abc", 12)
    special = byte_tokenizer()
    special.add_special_tokens([letter := special.id_to_token(tokens[5])])
    engine.tokenizer = special
    assert letter not in TOKENIZER.decode(list(tokens[:5]))
    params = SamplingParams(max_tokens=12, stop=("never", letter))
    (completion,) = engine.generate(["abc"], params)
    assert completion.token_ids == tokens[:6]
    assert completion.finish_reason is FinishReason.STOP
    with pytest.raises(ValueError, match=r"stop: got 'x<\|endoftext\|>', expected ordinary"):
        engine.submit("abc", SamplingParams(stop=("x<|endoftext|>",)))


def test_stop_string_ends_the_text_before_it() -> None:
    engine = make_engine()
    (plain,) = engine.generate(["abc"], SamplingParams(max_tokens=12, ignore_eos=True))
    stop = plain.text[4:6]
    (completion,) = engine.generate(
        ["abc"], SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,))
    )
    assert completion.text == plain.text[: plain.text.index(stop)]
    assert completion.finish_reason is FinishReason.STOP


def test_the_context_ends_the_text() -> None:
    engine = make_engine(max_context=16)
    (completion,) = engine.generate(["0123456789"], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(completion.token_ids) == 6
    assert completion.finish_reason is FinishReason.LENGTH


def test_a_step_is_launched_before_the_last_tokens_are_read() -> None:
    engine = make_engine()
    request = engine.submit("abc", SamplingParams(max_tokens=4, ignore_eos=True))
    events: list[TokenEvent] = []
    runs = []
    for _ in range(5):
        before = len(events)
        events += engine.step()
        launched = sum(bucket.hits for bucket in engine.runner.stats().buckets)
        runs.append((launched, len(events) - before))
    # The prompt gives the first token; no run is made for a fifth one.
    assert runs == [(0, 0), (1, 1), (2, 1), (3, 1), (3, 1)]
    assert engine.idle
    assert tuple(event.token_id for event in events) == engine.result(request).token_ids


@pytest.mark.gpu
def test_the_host_waits_for_the_device_nowhere_but_for_tokens() -> None:
    engine = make_engine("cuda")
    prompts = ["a prompt of many chunks, of which all but one end nothing", "short", "third"]
    params = SamplingParams(max_tokens=6, repetition_penalty=1.1, temperature=0.5)
    engine.generate(prompts, params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for prompt in prompts:
            engine.submit(prompt, params)
        while not engine.idle:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("most", "steps"), [(8, 4), (16, 2), (2048, 1)])
def test_every_step_of_a_prompt_is_timed(most: int, steps: int) -> None:
    engine = make_engine(prefill_chunk=8, max_prefill_tokens=most)
    engine.generate(["x" * 29], SamplingParams(max_tokens=1))
    assert len(engine.stats.prefill_seconds) == steps
    assert engine.stats.prefill_tokens == 29


def test_texts_go_on_in_every_step_while_a_long_prompt_comes() -> None:
    engine = make_engine(prefill_chunk=8, max_prefill_tokens=68)  # a quarter: 16 and the text's
    growing = engine.submit("abc", SamplingParams(max_tokens=60, ignore_eos=True))
    while not engine.step():
        pass
    before = engine.stats.prefill_tokens
    engine.submit("x" * 90, SamplingParams(max_tokens=1))
    computed = []
    while engine.stats.prefill_tokens < before + 90:
        events = engine.step()
        assert [event.request_id for event in events] == [growing]
        computed.append(engine.stats.prefill_tokens - before)
    assert computed == [16, 32, 48, 64, 90]  # the last step takes what is left


@pytest.mark.parametrize("cap", [0.0, 1e-3])
def test_prompts_beside_a_text_change_none_of_its_tokens(cap: float) -> None:
    """Nor where logits are equal once they are capped, of which the first would be taken."""
    engine = make_engine(model=tiny_llama(logits_softcap=cap), prefill_chunk=8)
    expected = greedy(engine, "abc", 20)
    growing = engine.submit("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    others = []
    for length in range(5, 45):
        others.append(engine.submit("x" * length, SamplingParams(max_tokens=1)))
        engine.step()
    while not engine.idle:
        engine.step()
    assert engine.result(growing).token_ids == expected
    assert all(len(engine.result(other).token_ids) == 1 for other in others)
    assert engine.stats.prefill_seconds.steps >= 20


def test_more_prompts_than_texts_have_whole_steps() -> None:
    engine = make_engine(prefill_chunk=8, max_prefill_tokens=65)  # the text's among them
    engine.submit("abc", SamplingParams(max_tokens=60, ignore_eos=True))
    while not engine.step():
        pass
    for _ in range(2):
        engine.submit("x" * 60, SamplingParams(max_tokens=60, ignore_eos=True))
    computed = [engine.stats.prefill_tokens]
    while engine.stats.prefill_tokens < 3 + 2 * 60:
        engine.step()
        computed.append(engine.stats.prefill_tokens)
    # The second step leaves both four tokens, and the third what is left.
    assert computed == [3, 67, 123]


def test_an_early_end_leaves_nothing_of_the_step_in_flight() -> None:
    engine = make_engine()
    expected = {prompt: greedy(engine, prompt, 12) for prompt in ("abc", "other")}
    stop = expected["abc"][4]
    kept = expected["abc"][: expected["abc"].index(stop) + 1]
    ending = engine.submit("abc", SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    going_on = engine.submit("other", SamplingParams(max_tokens=12, ignore_eos=True))
    events = []
    while not engine.idle:
        events += engine.step()
    assert [e.token_id for e in events if e.request_id == ending] == list(kept)
    assert engine.result(ending).token_ids == kept
    assert engine.result(going_on).token_ids == expected["other"]
    assert engine.cache.free_pages == engine.cache.usable_pages


def test_repetition_penalty_counts_prompt_and_text() -> None:
    engine = make_engine()
    tokens = engine.generate(
        ["abc"], SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1e6)
    )[0].token_ids
    assert len(set(tokens)) == 40
    assert not set(tokens) & set(TOKENIZER.encode("abc").ids)


def test_requests_arrive_and_are_cancelled_while_others_run() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = {p: greedy(engine, p, 10) for p in ("first", "second", "third")}
    first = engine.submit("first", params)
    engine.step()
    second = engine.submit("second", params)
    third = engine.submit("third", params)
    engine.step()
    event = engine.cancel(second)
    assert event == TokenEvent(second, None, event.text, FinishReason.CANCELLED)
    while not engine.idle:
        assert all(event.request_id != second for event in engine.step())
    assert engine.result(first).token_ids == expected["first"]
    assert engine.result(third).token_ids == expected["third"]
    cancelled = engine.result(second)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert cancelled.token_ids == expected["second"][: len(cancelled.token_ids)]
    assert engine.cache.free_pages == engine.cache.usable_pages


def test_closing_a_stream_cancels_what_is_unfinished() -> None:
    engine = make_engine()
    stream = engine.stream(["abc", "def"], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert engine.idle
    assert engine.cache.free_pages == engine.cache.usable_pages


def test_closing_a_stream_that_was_never_read_cancels_it() -> None:
    engine = make_engine()
    engine.stream(["abc"], SamplingParams()).close()
    assert engine.idle
    with engine.stream(["abc"], SamplingParams()):
        pass
    assert engine.idle


def test_a_stream_dropped_in_a_step_is_cancelled_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the garbage collector may drop one anywhere, and on any thread."""
    engine = make_engine()
    expected = greedy(engine, "abc", 6)
    streams = [engine.stream(["other"], SamplingParams(max_tokens=50, ignore_eos=True))]
    next(streams[0])
    version = engine.cache.version

    def drop_and_ask(sequence: int) -> int:
        streams.clear()
        return version(sequence)

    monkeypatch.setattr(engine.cache, "version", drop_and_ask)
    assert greedy(engine, "abc", 6) == expected
    assert engine.idle
    assert engine.cache.free_pages == engine.cache.usable_pages
    assert not engine._requests
    assert not engine._queues


def test_a_cancelled_request_has_no_event_behind_its_last() -> None:
    engine = make_engine()
    request = engine.submit("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    engine.generate(["other"], SamplingParams(max_tokens=4, ignore_eos=True))
    event = engine.cancel(request)
    completion = engine.result(request)
    assert len(completion.token_ids) > 1
    assert event.text == completion.text
    assert engine.step() == []


def test_tokens_that_nobody_gets_are_not_counted() -> None:
    engine = make_engine()
    tokens = greedy(engine, "abc", 12)
    for _ in range(2):
        engine.generate(["abc"], SamplingParams(max_tokens=12, stop_token_ids=(tokens[5],)))
    kept = tokens.index(tokens[5])
    assert engine.stats.decode_tokens == 11 + 2 * kept
    assert len(engine.stats.decode_seconds) == 11 + 2 * kept


def test_streams_submitted_requests_and_generate_share_an_engine() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = {p: greedy(engine, p, 6) for p in ("a", "bb", "ccc", "dddd")}
    submitted = engine.submit("a", params)
    one = engine.stream(["bb"], params)
    two = engine.stream(["ccc"], params)
    tokens: dict[str, list[int | None]] = {"bb": [next(one).token_id], "ccc": []}
    assert engine.generate(["dddd"], params)[0].token_ids == expected["dddd"]
    tokens["ccc"] += [event.token_id for event in two]
    tokens["bb"] += [event.token_id for event in one]
    assert tokens == {"bb": list(expected["bb"]), "ccc": list(expected["ccc"])}
    assert [e.token_id for e in engine.step() if e.request_id == submitted] == list(expected["a"])
    assert engine.result(submitted).token_ids == expected["a"]


def test_cancelling_a_streamed_request_ends_its_stream() -> None:
    engine = make_engine()
    greedy(engine, "abc", 2)  # so that ids of the engine and indices of prompts differ
    stream = engine.stream(["abc"], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    engine.cancel(1)
    assert [event.finish_reason for event in stream] == [FinishReason.CANCELLED]


def test_verification_reads_and_writes_real_pages_and_slots() -> None:
    engine = Engine(tiny_llama(), TOKENIZER, max_batch=4, page_size=4, prefill_chunk=8)
    seen: dict[str, set[int]] = {"slot_mapping": set(), "slots": set()}
    page_tables: set[tuple[int, ...]] = set()
    step = engine.runner._captured._step

    def watched(batch: Any) -> Any:
        for name, values in seen.items():
            values |= set(batch[name].tolist())
        page_tables.update(tuple(row) for row in batch.page_table.tolist())
        return step(batch)

    engine.runner._captured._step = watched
    engine.capture([4], progress=False)
    assert len(seen["slot_mapping"]) > 4
    assert {0, 1, 2, 3} < seen["slots"]
    assert len(page_tables) > 4
    assert engine.cache.free_pages == engine.cache.usable_pages


def test_capture_while_requests_run_is_refused() -> None:
    engine = make_engine()
    engine.submit("abc", SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    with pytest.raises(RuntimeError, match="capture: requests are running"):
        engine.capture([1], progress=False)
    while not engine.idle:
        engine.step()
    engine.capture([1], progress=False)


@pytest.mark.parametrize("closed", [False, True])
def test_a_cache_goes_with_its_engine(closed: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        engine = make_engine()
        engine.generate(["a"], SamplingParams(max_tokens=3))
        if closed:
            engine.close()
        cache = weakref.ref(engine.cache)
        del engine
        assert cache() is None
    finally:
        gc.enable()
