"""The engine end to end: texts, events, limits, and independence of what runs beside a request."""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_beginnings import check_shared_beginnings

from effort import effort
from ostinato import ops
from ostinato.engine import Completion, Engine, FinishReason, SamplingParams, TokenEvent
from ostinato.engine import decode_step as decode_module
from ostinato.engine.decode_step import sampling_inputs
from ostinato.engine.detokenizer import Detokenizer
from ostinato.graphs import ClosedError, NotCapturedError
from ostinato.models import Decoder, RopeConfig, sequence_logits
from ostinato.ops.attention import prefill_cuda
from ostinato.ops.attention.prefill_cuda import attend_paged
from tiny import KV_CACHES, byte_tokenizer, tiny_llama

TOKENIZER = byte_tokenizer()
SCHEMES = ("plain", "int8", "fp8")
# Of linear layers, and the kind of the KV cache.
SERVED = [
    *((scheme, "model") for scheme in SCHEMES),
    *(("plain", cache) for cache in KV_CACHES if cache != "model"),
    ("int8", "fp8"),
]


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


# Tokens, and what tells the texts of one length apart; the second begins as the first.
LONG_PROMPTS = ((1300, 1), (900, 1), (450, 3), (513, 5), (40, 7), (3, 2))
REQUESTS = st.lists(
    st.tuples(
        # Few beginnings of more than one chunk, so that prefixes are shared.
        st.builds(
            str.__add__,
            st.sampled_from(["", "a common beginning, ", "another one of 19, "]),
            st.text(alphabet="abcdef ", min_size=1, max_size=12),
        ),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 14),
            temperature=st.sampled_from([0.0, 0.8, 1.5]),
            top_k=st.sampled_from([0, 5, 300]),
            top_p=st.sampled_from([0.6, 1.0]),
            min_p=st.sampled_from([0.0, 0.02]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            seed=st.integers(0, 2**40),
        ),
    ),
    min_size=1,
    max_size=6,
)


class Pair:
    """One engine with room for everything one by one, one that is crowded and short of pages."""

    def __init__(self, device: torch.device, scheme: str, cache: str) -> None:
        model = tiny_llama(device, scheme, cache=cache)
        self.alone = make_engine(model=model, cache=cache, max_batch=1, batch_sizes=[1])
        self.crowded = make_engine(
            model=model,
            cache=cache,
            batch_sizes=[1, 3],
            max_context=48,
            num_pages=14,
            max_prefill_tokens=8,
        )


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[tuple[str, str, str], Pair]]:
    made: dict[tuple[str, str, str], Pair] = {}
    yield made
    for pair in made.values():
        pair.alone.close()
        pair.crowded.close()


@pytest.mark.parametrize(("scheme", "cache"), SERVED)
@settings(
    max_examples=effort(8, 25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests=REQUESTS)
def test_tokens_do_not_depend_on_neighbours_load_or_preemption(
    scheme: str,
    cache: str,
    device: torch.device,
    pairs: dict[tuple[str, str, str], Pair],
    requests: list[tuple[str, SamplingParams]],
) -> None:
    key = (device.type, scheme, cache)
    if key not in pairs:
        pairs[key] = Pair(device, scheme, cache)
    pair = pairs[key]
    prompts = [prompt for prompt, _ in requests]
    params = [p for _, p in requests]
    together = pair.crowded.generate(prompts, params)
    for prompt, p, completion in zip(prompts, params, together, strict=True):
        (expected,) = pair.alone.generate([prompt], p)
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text


@pytest.mark.parametrize("cache", KV_CACHES)
def test_forced_preemption_changes_no_token(cache: str, device: torch.device) -> None:
    model = tiny_llama(device, "int8", cache=cache)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, repetition_penalty=1.2)
    prompts = [f"prompt {i}" for i in range(6)]
    roomy = make_engine(model=model, cache=cache)
    tight = make_engine(model=model, cache=cache, max_context=32, num_pages=12)
    expected = roomy.generate(prompts, params)
    got = tight.generate(prompts, params)
    assert tight.stats.preemptions > 0
    assert roomy.stats.preemptions == 0
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


@pytest.mark.parametrize("cache", KV_CACHES)
def test_shared_prefixes_save_work_and_change_no_token(cache: str, device: torch.device) -> None:
    model = tiny_llama(device, "int8", cache=cache)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prefix = "0123456789abcdef"
    prompts = [prefix + "x", prefix + "y and more", prefix]
    fresh = [
        make_engine(model=model, cache=cache).generate([prompt], params)[0] for prompt in prompts
    ]
    engine = make_engine(model=model, cache=cache)
    shared = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert [c.token_ids for c in shared] == [c.token_ids for c in fresh]
    # The last prompt computes its last page, or its second chunk, again: logits of its last token
    # are needed.
    again = 4 if device.type == "cpu" else 8
    assert engine.stats.prefill_tokens == 17 + 10 + again


@pytest.mark.parametrize(("scheme", "cache"), SERVED)
def test_prefixes_shared_by_the_page_change_no_bit(scheme: str, cache: str) -> None:
    options = {"prefill_chunk": 32, "max_context": 128, "logits_processing": True}
    engine = make_engine("cpu", scheme, [1], cache=cache, **options)
    base = [(7 * at + at // 11) % 200 + 40 for at in range(91)]
    check_shared_beginnings(engine, base, [4, 28, 32, 44, 60, 64, 88])


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("cache", ["model", "fp8", "int8"])
def test_prefixes_shared_by_the_tile_change_no_bit(cache: str) -> None:
    sizes = {"head_dim": 128, "max_position_embeddings": 2048}
    model = tiny_llama("cuda", "int8", cache=cache, dtype=torch.bfloat16, **sizes)
    options = {"page_size": 16, "prefill_chunk": 512, "logits_processing": True}
    engine = make_engine(model=model, cache=cache, batch_sizes=[1], max_context=1600, **options)
    base = [(7 * at + at // 11) % 200 + 40 for at in range(1500)]
    check_shared_beginnings(engine, base, [128, 256, 384, 512, 896, 1024, 1408])


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("head_dim", [64, 128])
def test_our_prefill_kernel_changes_no_token(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do neighbours, shared prefixes and, at multiples of 384, the size of chunks."""
    launches: list[bool] = []
    signature = inspect.signature(attend_paged)

    def attend(*args: Any) -> None:
        launches.append(signature.bind(*args).arguments["batch_invariant"])
        attend_paged(*args)

    monkeypatch.setattr(prefill_cuda, "attend_paged", attend)
    model = tiny_llama(
        "cuda",
        dtype=torch.bfloat16,
        head_dim=head_dim,
        max_position_embeddings=2048,
    )
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=2, ignore_eos=True)
    prompts = [[(7 * i + i // 11 * shift) % 256 for i in range(n)] for n, shift in LONG_PROMPTS]
    options = {"page_size": 16, "max_context": 1400, "max_prefill_tokens": 800}
    small, large = (
        make_engine(model=model, prefill_chunk=chunk, **options) for chunk in (384, 1152)
    )
    alone = [small.generate([prompt], params)[0] for prompt in prompts]
    for engine in (small, large):
        for prompt_ids in (prompts, prompts[::-1]):
            together = engine.generate(prompt_ids, params)
            expected = alone if prompt_ids is prompts else alone[::-1]
            assert [c.token_ids for c in together] == [c.token_ids for c in expected]
    assert launches
    assert all(launches)


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


def greedy(engine: Engine, prompt: str, count: int) -> tuple[int, ...]:
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))
    return completion.token_ids


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


@pytest.mark.parametrize("token", [-1, 257, 10**9])
def test_stop_ids_outside_the_vocabulary_are_named(token: int) -> None:
    engine = make_engine()
    params = SamplingParams(stop_token_ids=(3, token))
    for call in (engine.submit, lambda prompt, params: engine.generate([prompt], params)):
        with pytest.raises(ValueError, match=f"stop_token_ids: got token id {token}, expected 0"):
            call("abc", params)
    assert engine.idle


@pytest.mark.parametrize(
    ("scheme", "how"),
    [
        *((scheme, {}) for scheme in SCHEMES),
        ("plain", {"temperature": 0.8}),
        ("int8", {"temperature": 0.8, "top_k": 3, "top_p": 0.5, "min_p": 0.1}),
        ("plain", {"repetition_penalty": 1.3}),
        ("fp8", {"temperature": 1.0, "repetition_penalty": 1.3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", KV_CACHES)
def test_logits_that_are_nan_end_their_text_alone(
    scheme: str, how: dict[str, Any], cache: str, device: torch.device
) -> None:
    model = tiny_llama(device, scheme, cache=cache)
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=5, **how)
    others = make_engine(model=model, cache=cache).generate(["abc", "de"], params)
    used = {*TOKENIZER.encode("abcde").ids, *others[0].token_ids, *others[1].token_ids}
    unused = next(token for token in range(256) if token not in used)
    broken = tiny_llama(device, scheme, cache=cache)
    embedding = next(tensor for tensor in broken.tensors() if tensor.shape[0] == 257)
    embedding[unused] = torch.nan
    engine = make_engine(model=broken, cache=cache)
    found = engine.generate(["abc", [97, unused, 98], "de"], params)
    assert [found[0].text, found[2].text] == [other.text for other in others]
    assert [found[0].token_ids, found[2].token_ids] == [other.token_ids for other in others]
    assert found[1].finish_reason is FinishReason.ERROR
    assert found[1].token_ids == ()
    assert found[1].text == ""
    assert engine.stats.failed_requests == 1
    assert engine.idle
    assert engine.generate(["abc"], params)[0].token_ids == others[0].token_ids


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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_torchs_default_device_changes_no_token(scheme: str, device: torch.device) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, repetition_penalty=1.2)
    prompts = ["abc", "a prompt of more than one chunk", "third"]
    model = tiny_llama(device, scheme)
    expected = make_engine(model=model, max_context=48).generate(prompts, params)
    torch.set_default_device("meta" if device.type == "cpu" else device)
    try:
        table = RopeConfig().cos_sin_table(8, 128)
        found = make_engine(model=model, max_context=48).generate(prompts, params)
    finally:
        torch.set_default_device(None)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert table.equal(next(model.attention.tables()).cpu())


def test_an_engine_made_in_inference_mode_works_outside_it() -> None:
    expected = greedy(make_engine(), "abc", 4)
    with torch.inference_mode():
        engine = make_engine()
    assert greedy(engine, "abc", 4) == expected


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
