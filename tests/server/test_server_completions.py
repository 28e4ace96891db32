"""/v1/completions against `Engine.generate`: texts, fields, streams, cancels."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ostinato.engine import Engine, SamplingParams
from random_requests import params_of, random_fields, random_prompt
from serving import JSON_HEAD, MODEL, TOKENIZER, Client, make_engine, make_service, serving, sse
from tiny import tiny_llama

PATH = "/v1/completions"


def _streamed(client: Client, body: dict[str, Any]) -> str:
    events = client.events(PATH, body)
    return "".join(event["choices"][0]["text"] for event in events)


def _leave(client: Client, body: dict[str, Any], after: int) -> None:
    """Read some events of a stream and close the connection."""
    connection = client.connect()
    connection.request("POST", PATH, json.dumps({**body, "stream": True}), JSON_HEAD)
    answer = connection.getresponse()
    for _, _ in zip(range(after), sse(answer), strict=False):
        pass
    answer.close()
    connection.close()


def test_texts_equal_generate_under_load_and_cancels(client: Client, engine: Engine) -> None:
    draw = random.Random(1)
    cases = [(random_prompt(draw), random_fields(draw)) for _ in range(60)]
    kinds = [draw.choice(["whole", "stream", "stream", "leave"]) for _ in cases]

    def ask(at: int) -> str | None:
        prompt, fields = cases[at]
        body = {"prompt": prompt, **fields}
        if kinds[at] == "leave":
            _leave(client, {**body, "ignore_eos": True, "max_tokens": 60}, at % 4)
            return None
        if kinds[at] == "stream":
            return _streamed(client, body)
        return str(client.complete(**body)["choices"][0]["text"])

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, range(len(cases))))
    expected = engine.generate([p for p, _ in cases], [params_of(f) for _, f in cases])
    for at, text in enumerate(texts):
        if text is not None:
            assert text == expected[at].text, cases[at]
    client.wait_idle()


@pytest.mark.gpu
def test_texts_equal_generate_on_a_gpu() -> None:
    draw = random.Random(2)
    cases = [(random_prompt(draw), random_fields(draw)) for _ in range(64)]
    with (
        serving(make_service(lambda: make_engine(model=tiny_llama("cuda")))) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        texts = list(
            pool.map(lambda case: _streamed(client, {"prompt": case[0], **case[1]}), cases)
        )
        client.wait_idle()
    engine = make_engine(model=tiny_llama("cuda"))
    expected = engine.generate([p for p, _ in cases], [params_of(f) for _, f in cases])
    assert texts == [completion.text for completion in expected]


def test_choices_have_seeds_that_follow_each_other(client: Client, engine: Engine) -> None:
    fields = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    answer = client.complete(["one", "two"], n=2, seed=7, **fields)
    seeds = [7, 8, 7, 8]
    expected = engine.generate(
        ["one", "one", "two", "two"], [SamplingParams(**fields, seed=seed) for seed in seeds]
    )
    assert [c["text"] for c in answer["choices"]] == [c.text for c in expected]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 32, "total_tokens": 38}


def test_token_ids_are_prompts(client: Client) -> None:
    fields = {"max_tokens": 6, "temperature": 0}
    ids = TOKENIZER.encode("a prompt").ids
    text = client.complete("a prompt", **fields)["choices"][0]["text"]
    both = client.complete([ids, ids], **fields)["choices"]
    assert client.complete(ids, **fields)["choices"][0]["text"] == text
    assert [choice["text"] for choice in both] == [text, text]


def test_echo_puts_the_prompt_before_the_text(client: Client) -> None:
    fields = {"max_tokens": 5, "temperature": 0}
    text = client.complete("abc", **fields)["choices"][0]["text"]
    ids = TOKENIZER.encode("abc").ids
    assert client.complete(ids, echo=True, **fields)["choices"][0]["text"] == "abc" + text
    assert _streamed(client, {"prompt": "abc", "echo": True, **fields}) == "abc" + text


def test_stream_says_its_usage_at_the_end(client: Client) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "seed": 1}
    *events, last = client.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert all(event["usage"] is None for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert {event["id"] for event in (*events, last)} == {last["id"]}
    assert all("usage" not in event for event in client.events(PATH, body))


def test_stop_string_ends_the_text_before_it(client: Client) -> None:
    fields = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    whole = client.complete("abc", **fields)["choices"][0]["text"]
    stop = whole[4:6]
    (choice,) = client.complete("abc", stop=stop, **fields)["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_default_is_sixteen_tokens_but_the_context(client: Client) -> None:
    answer = client.complete("abc", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    answer = client.complete("a" * 120, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8


def test_max_completion_tokens_counts_before_max_tokens(client: Client) -> None:
    for fields, count in (({}, 3), ({"max_tokens": 9}, 3), ({"max_tokens": 2}, 3)):
        answer = client.complete("abc", ignore_eos=True, max_completion_tokens=3, **fields)
        assert answer["usage"]["completion_tokens"] == count


def test_models_health_version_and_tokens(client: Client) -> None:
    status, models = client.get("/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, [MODEL])
    assert client.get(f"/v1/models/{MODEL}")[1]["max_model_len"] == 128
    assert client.get("/health") == (200, {"status": "ok"})
    assert client.get("/ready") == (200, {"status": "ready"})
    assert "version" in client.get("/version")[1]
    status, tokens = client.post("/tokenize", {"prompt": "héllo"})
    assert tokens == {"tokens": TOKENIZER.encode("héllo").ids, "count": 6, "max_model_len": 128}
    assert client.post("/detokenize", {"tokens": tokens["tokens"]})[1] == {"prompt": "héllo"}


def test_metrics_count_tokens_and_answers(client: Client) -> None:
    def read(name: str) -> float:
        lines = client.get("/metrics")[1].splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))

    before = read("ostinato_completion_tokens_total")
    client.complete("abc", max_tokens=5, ignore_eos=True)
    assert read("ostinato_completion_tokens_total") == before + 5
    assert read("ostinato_graph_runs_total") > 0
    assert read('ostinato_http_answers_total{route="/v1/completions",status="200"}') > 0


def test_metrics_count_a_prompt_once_for_all_its_choices(client: Client) -> None:
    def counted() -> float:
        lines = client.get("/metrics")[1].splitlines()
        return float(next(x.split()[1] for x in lines if x.startswith("ostinato_prompt_tokens_t")))

    before = counted()
    usage = client.complete("abcdefg", n=3, max_tokens=2, ignore_eos=True)["usage"]
    assert counted() - before == usage["prompt_tokens"]


def test_metrics_count_shared_prefixes_and_evictions() -> None:
    def read(name: str) -> float:
        lines = client.get("/metrics")[1].splitlines()
        return float(next(x.split()[-1] for x in lines if x.startswith(f"ostinato_engine_{name} ")))

    # 39 pages of 4 tokens; a prompt of 40 keeps 10 of them.
    with serving(make_service(lambda: make_engine(num_pages=40))) as client:
        shared = "a" * 40
        client.complete(shared + "1", max_tokens=1)
        assert read("shared_tokens_total") == 0
        client.complete(shared + "2", max_tokens=1)
        assert (read("prefix_tokens_total"), read("shared_tokens_total")) == (80, 40)
        assert read("prefill_tokens_total") == 41 + 1
        assert read("prefill_steps_total") == 2
        assert read("prefill_seconds_total") > 0
        assert (read("decode_steps_total"), read("decode_seconds_total")) == (0, 0)
        client.complete("x", max_tokens=5, ignore_eos=True)
        assert read("decode_steps_total") == 4
        assert 0 < read("decode_seconds_total") < 20
        assert read("evicted_pages_total") == 0
        for letter in "bcde":
            client.complete(letter * 40, max_tokens=1)
        assert read("evicted_pages_total") > 0


def test_first_token_behind_a_shared_prompt_needs_less() -> None:
    """Count steps and tokens, which take the time: a clock also counts what others do."""
    model = tiny_llama(max_position_embeddings=4200)
    options = {"page_size": 16, "prefill_chunk": 512, "max_prefill_tokens": 512}
    system = [(7 * at + at // 11 * 5) % 256 for at in range(4000)]
    with serving(make_service(lambda: make_engine(model=model, **options))) as client:

        def work(prompt: list[int]) -> tuple[int, int]:
            """Return how many prompt tokens a request computes, and in how many steps."""
            before = counted()
            client.complete(prompt, max_tokens=1)
            client.wait_idle()
            tokens, steps = counted()
            return tokens - before[0], steps - before[1]

        def counted() -> tuple[int, int]:
            stats = client.ask(lambda engine: engine.stats)
            return stats.prefill_tokens, len(stats.prefill_seconds)

        assert work([*system, *range(50)]) == (4050, 8)
        for start in (70, 71, 72):
            assert work([*system, *range(start, 130)]) == (130 - start, 1)
        cache = client.ask(lambda engine: engine.cache)
        assert cache.shared_tokens == 3 * 4000


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings", "/nothing"])
def test_what_is_not_served_answers_404_by_name(client: Client, path: str) -> None:
    assert path in client.refused({}, path, 404)["message"]
