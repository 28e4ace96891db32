"""Log-probabilities, biases, penalties and minimum lengths in the engine, beside plain requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import effort
from ostinato.engine import Completion, Engine, FinishReason, SamplingParams, TokenEvent
from ostinato.models import sequence_logits
from tiny import byte_tokenizer, tiny_llama

TOKENIZER = byte_tokenizer()


def make_engine(
    device: torch.device | str = "cpu", scheme: str = "plain", **options: Any
) -> Engine:
    sizes = options.pop("batch_sizes", None)
    model = options.pop("model", None) or tiny_llama(device, scheme)
    defaults: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_chunk": 8}
    engine = Engine(model, TOKENIZER, **{"logits_processing": True, **defaults, **options})
    engine.capture(sizes, progress=False)
    return engine


def processed_steps(engine: Engine) -> tuple[int, int]:
    """Return how many decode steps processed logits, and how many did not."""
    hits = {"": 0, "processed": 0}
    for bucket in engine.runner.stats().buckets:
        hits[bucket.variant] += bucket.hits
    return hits["processed"], hits[""]


def whole_text(completion: Completion, prompt: str) -> list[int]:
    return [*TOKENIZER.encode(prompt).ids, *completion.token_ids]


def same_but_id(one: Completion, other: Completion) -> bool:
    return replace(one, request_id=other.request_id) == other


def plain_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 10),
        temperature=st.sampled_from([0.0, 0.9]),
        top_p=st.sampled_from([0.6, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        seed=st.integers(0, 2**40),
    )


def asking_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        replace,
        plain_params(),
        presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
        logit_bias=st.dictionaries(st.integers(0, 256), st.sampled_from([-100.0, 3.0]), max_size=4),
        logprobs=st.sampled_from([None, 0, 3]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        max_tokens=st.just(10),
        min_tokens=st.sampled_from([0, 4]),
    )


REQUESTS = st.lists(
    st.tuples(
        st.text(alphabet="abcdef ", min_size=1, max_size=20),
        st.one_of(plain_params(), asking_params()),
    ),
    min_size=1,
    max_size=6,
)


class Engines:
    """One without processing, one with and room for everything, one short of pages."""

    def __init__(self, device: torch.device, scheme: str) -> None:
        model = tiny_llama(device, scheme)
        alone: dict[str, Any] = {"model": model, "max_batch": 1, "batch_sizes": [1]}
        self.plain = make_engine(logits_processing=False, **alone)
        self.alone = make_engine(**alone)
        crowded = {"max_context": 48, "num_pages": 14, "max_prefill_tokens": 8}
        self.crowded = make_engine(model=model, batch_sizes=[1, 3], **crowded)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[tuple[str, str], Engines]]:
    made: dict[tuple[str, str], Engines] = {}
    yield made
    for group in made.values():
        for engine in (group.plain, group.alone, group.crowded):
            engine.close()


@pytest.mark.parametrize("scheme", ["plain", "int8"])
@settings(max_examples=effort(4, 15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=REQUESTS)
def test_requests_do_not_depend_on_what_others_ask_for(
    scheme: str,
    device: torch.device,
    engines: dict[tuple[str, str], Engines],
    requests: list[tuple[str, SamplingParams]],
) -> None:
    key = (device.type, scheme)
    if key not in engines:
        engines[key] = Engines(device, scheme)
    group = engines[key]
    together = group.crowded.generate([prompt for prompt, _ in requests], [p for _, p in requests])
    for (prompt, params), completion in zip(requests, together, strict=True):
        asks = params.processes_logits or params.min_tokens or params.prompt_logprobs is not None
        engine = group.alone if asks else group.plain
        (expected,) = engine.generate([prompt], params)
        assert same_but_id(completion, expected)


def test_preempted_requests_keep_their_counts(device: torch.device) -> None:
    model = tiny_llama(device, "int8")
    params = SamplingParams(
        max_tokens=20, temperature=1.0, seed=5, presence_penalty=2.0, frequency_penalty=1.0,
        logprobs=2, ignore_eos=True,
    )  # fmt: skip
    prompts = [f"prompt {i}" for i in range(6)]
    roomy = make_engine(model=model)
    tight = make_engine(model=model, max_context=32, num_pages=12)
    expected = roomy.generate(prompts, params)
    got = tight.generate(prompts, params)
    assert all(map(same_but_id, got, expected))
    assert tight.stats.preemptions > 0


def test_a_half_prompt_that_is_preempted_keeps_one_row_a_token(device: torch.device) -> None:
    prompt = list(range(5, 105))
    asked = SamplingParams(max_tokens=2, prompt_logprobs=0, ignore_eos=True, seed=1)
    sizes: dict[str, Any] = {"max_batch": 2, "prefill_chunk": 8, "max_prefill_tokens": 32}
    sizes |= {"model": tiny_llama(device), "max_context": 128}
    (expected,) = make_engine(**sizes).generate([prompt], asked)
    preempted = 0
    for pages in range(27, 32):
        tight = make_engine(**sizes, num_pages=pages)
        tight.submit([5], SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(3):
            tight.step()
        request = tight.submit(prompt, asked)
        while not tight.idle:
            tight.step()
        preempted += tight.stats.preemptions
        got = tight.result(request)
        assert got.prompt_logprobs is not None
        assert len(got.prompt_logprobs) == len(prompt)
        assert same_but_id(got, expected)
    assert preempted


def test_least_tokens_beyond_any_number_are_the_most_there_may_be() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=2**63, min_tokens=2**63)
    good, long = engine.submit("abc", SamplingParams(max_tokens=3)), engine.submit("de", params)
    while not engine.idle:
        engine.step()
    assert len(engine.result(good).token_ids) == 3
    assert engine.result(long).finish_reason is FinishReason.LENGTH


def test_only_steps_that_need_it_process_logits(device: torch.device) -> None:
    engine = make_engine(device)
    plain = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.generate(["abc", "de"], plain)
    assert processed_steps(engine) == (0, 8)
    engine.generate(["abc"], replace(plain, min_tokens=4, ignore_eos=False))
    processed, others = processed_steps(engine)
    assert processed == 3  # the first token is the prompt's
    assert others > 8
    engine.generate(["abc", "de"], [plain, replace(plain, logprobs=0)])
    assert processed_steps(engine)[0] == 3 + 8


@pytest.mark.parametrize("scheme", ["plain", "fp8"])
def test_logprobs_are_those_of_the_model(scheme: str, device: torch.device) -> None:
    engine = make_engine(device, scheme)
    params = SamplingParams(
        max_tokens=8, temperature=1.2, seed=1, logprobs=4, prompt_logprobs=2, logit_bias={65: 5},
        ignore_eos=True,
    )  # fmt: skip
    prompt = "a prompt longer than a chunk"
    (first, again) = (engine.generate([prompt], params)[0] for _ in range(2))
    assert same_but_id(again, first)  # though its prefix is in the cache
    tokens = whole_text(first, prompt)
    exact = sequence_logits(engine.model, tokens).log_softmax(dim=1)
    assert first.logprobs is not None
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    found = [*first.prompt_logprobs, *first.logprobs]
    assert len(found) == len(tokens)
    for at, told in list(enumerate(found))[1:]:
        assert told is not None
        row = exact[at - 1]
        assert told.logprob == pytest.approx(row[tokens[at]].item(), abs=2e-3)
        best = row.sort(descending=True).values[: len(told.top)].tolist()
        assert [value for _, value in told.top] == pytest.approx(best, abs=2e-3)
        assert [row[token].item() for token, _ in told.top] == pytest.approx(best, abs=2e-3)
        assert len(told.top) == (2 if at < first.prompt_tokens else 4)


def test_events_bring_logprobs() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)
    with engine.stream(["abc", "de"], [params, replace(params, logprobs=None)]) as stream:
        events: list[TokenEvent] = list(stream)
        first, second = stream.completions
    assert tuple(e.logprobs for e in events if e.request_id == 0) == first.logprobs
    assert all(e.logprobs is None for e in events if e.request_id == 1)
    assert second.logprobs is None
    assert second.prompt_logprobs is None


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -0.5, "presence_penalty": 0.5, "repetition_penalty": 1.5},
        {"logit_bias": {65: 100.0}, "frequency_penalty": 2.0},
        {"logit_bias": {65: 7.0, 66: -100, 67: 6.5}, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_greedy_text_follows_the_processed_logits(
    changes: dict[str, Any], device: torch.device
) -> None:
    engine = make_engine(device)
    params = SamplingParams(max_tokens=14, ignore_eos=True, **changes)
    (completion,) = engine.generate(["some prompt"], params)
    tokens = whole_text(completion, "some prompt")
    start = completion.prompt_tokens
    plain = engine.generate(["some prompt"], SamplingParams(max_tokens=14, ignore_eos=True))[0]
    assert completion.token_ids != plain.token_ids
    for at in range(start, len(tokens)):
        logits = sequence_logits(engine.model, tokens[:at])[-1].cpu()
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        seen = sorted({*tokens[:at]})
        divided = logits[seen] / params.repetition_penalty
        multiplied = logits[seen] * params.repetition_penalty
        logits[seen] = torch.where(logits[seen] > 0, divided, multiplied)
        for token in tokens[start:at]:
            logits[token] -= params.frequency_penalty
        for token in {*tokens[start:at]}:
            logits[token] -= params.presence_penalty
        assert logits[tokens[at]] >= logits.max() - 1e-3


def test_no_text_ends_before_its_least_length(device: torch.device) -> None:
    engine = make_engine(device)
    (free,) = engine.generate(["abc"], SamplingParams(max_tokens=12, ignore_eos=True))
    stops = free.token_ids[:3]
    params = SamplingParams(max_tokens=12, stop_token_ids=stops, min_tokens=6)
    (completion,) = engine.generate(["abc"], params)
    assert not {*stops, 256} & {*completion.token_ids[:6]}
    assert len(completion.token_ids) >= 6


def test_an_end_that_the_model_cannot_sample_is_passed_over() -> None:
    engine = make_engine(model=tiny_llama(eos_token_ids=(256, 900)))
    (completion,) = engine.generate(["abc"], SamplingParams(max_tokens=6, min_tokens=6))
    assert len(completion.token_ids) == 6


def test_stop_strings_wait_for_the_least_length() -> None:
    engine = make_engine()
    letters = [
        t for t in range(257) if (text := TOKENIZER.decode([t])).isascii() and text.isalpha()
    ]
    bias = dict.fromkeys(letters, 100.0)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logit_bias=bias)
    (free,) = engine.generate(["abc"], params)
    assert len(free.text) == 30
    early = free.text[:2]
    pairs = [free.text[at : at + 2] for at in range(7, 28)]
    late = next(pair for pair in pairs if pair not in free.text[:8])
    stopped = replace(params, stop=(early, late), min_tokens=5)
    place = free.text.index(late)
    assert early not in free.text[5:place]
    for include, end in ((False, place), (True, place + 2)):
        asked = replace(stopped, include_stop_str_in_output=include)
        with engine.stream(["abc"], asked) as stream:
            streamed = "".join(event.text for event in stream)
            (completion,) = stream.completions
        assert completion.finish_reason is FinishReason.STOP
        assert completion.text == streamed == free.text[:end]


def test_a_stop_string_may_be_shown() -> None:
    engine = make_engine(logits_processing=False)
    (free,) = engine.generate(["abc"], SamplingParams(max_tokens=12, ignore_eos=True))
    stop = free.text[4:6]
    params = SamplingParams(max_tokens=12, stop=(stop,), include_stop_str_in_output=True)
    with engine.stream(["abc"], params) as stream:
        streamed = "".join(event.text for event in stream)
    assert streamed == free.text[: free.text.index(stop) + 2]
    shown = replace(params, stop=(), stop_token_ids=free.token_ids[4:5])
    (completion,) = engine.generate(["abc"], shown)
    assert completion.text == TOKENIZER.decode(list(completion.token_ids))


ASKED = [
    ({"presence_penalty": 1.0}, "presence_penalty: got 1.0"),
    ({"frequency_penalty": -1}, "frequency_penalty: got -1"),
    ({"logit_bias": {1: 2.0}}, "logit_bias: got {1: 2.0}"),
    ({"logprobs": 0}, "logprobs: got 0"),
    ({"prompt_logprobs": 0}, "prompt_logprobs: got 0"),
    ({"min_tokens": 3}, "min_tokens: got 3"),
]


@pytest.mark.parametrize(("changes", "message"), ASKED)
def test_an_engine_without_graphs_for_it_refuses(changes: dict[str, Any], message: str) -> None:
    engine = make_engine(logits_processing=False)
    with pytest.raises(ValueError, match=message) as error:
        engine.submit("abc", SamplingParams(**changes))
    assert "logits_processing=True" in str(error.value)
    assert engine.idle


def test_biases_are_checked_against_the_vocabulary() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="logit_bias: got token id 257, expected 0 to 256"):
        engine.submit("abc", SamplingParams(logit_bias={257: 1.0}))


def test_too_many_edits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.engine import new_request

    monkeypatch.setattr(new_request, "MOST_EDITS", 3)
    engine = make_engine()
    bias = dict.fromkeys(range(3), 1.0)
    engine.submit("abc", SamplingParams(logit_bias=bias))
    with pytest.raises(ValueError, match="logit_bias: got 3 biases and 1 tokens that end a text"):
        engine.submit("abc", SamplingParams(logit_bias=bias, min_tokens=1))
    with pytest.raises(ValueError, match="stop_token_ids: got 0 biases and 4 tokens"):
        engine.submit("abc", SamplingParams(stop_token_ids=(1, 2, 3), min_tokens=1))


def test_the_report_names_both_variants() -> None:
    engine = Engine(tiny_llama(), TOKENIZER, max_batch=2, page_size=4, logits_processing=True)
    report = engine.capture([1, 2], progress=False)
    assert [(g.key.batch_size, g.key.variant.name) for g in report.graphs] == [
        *((1, ""), (2, ""), (1, "processed"), (2, "processed"))
    ]


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("scheme", ["plain", "int8"])
def test_tokens_of_the_argmax_epilogue_stay(scheme: str) -> None:
    """In the plain graph the projection hands over the best; the other graph stores all logits."""
    options: dict[str, Any] = {"max_batch": 40, "page_size": 16, "prefill_chunk": 64}
    model = tiny_llama("cuda", scheme, dtype=torch.bfloat16, head_dim=16)
    plain = make_engine(model=model, logits_processing=False, **options)
    engine = make_engine(model=model, **options)
    prompts = [f"prompt {i}" for i in range(40)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    mixed = [params] * 39 + [replace(params, logprobs=20, frequency_penalty=1.0)]
    expected = plain.generate(prompts, params)
    found = engine.generate(prompts, mixed)
    assert processed_steps(engine)[0] >= 15
    assert [c.token_ids for c in found[:-1]] == [c.token_ids for c in expected[:-1]]
    assert found[-1].token_ids != expected[-1].token_ids
