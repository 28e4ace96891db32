"""Log-probabilities, penalties, biases and forms of texts, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ostinato.engine import Engine, SamplingParams
from ostinato.engine.structured import grammar
from ostinato.server.chat.render import ChatTemplate
from serving import CHATML, MODEL, TOKENIZER, Client, make_engine, make_service, serving

PATH = "/v1/completions"
FIELDS: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def _schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture(scope="module")
def full() -> Iterator[Client]:
    """Serve a model whose engine processes logits."""
    engine = make_engine(logits_processing=True)
    service = make_service(lambda: engine, template=ChatTemplate({"default": CHATML}, {}, 10.0))
    with serving(service) as client:
        yield client


@pytest.fixture(scope="module")
def processing() -> Iterator[Engine]:
    """Return an engine of the same model."""
    engine = make_engine(logits_processing=True)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"min_tokens": 6, "ignore_eos": False},
        {"logit_bias": {"101": 100, "7": -3.5}},
        {"stop": "b", "include_stop_str_in_output": True, "logit_bias": {"65": 30}},
    ],
)
def test_processed_texts_equal_generate(
    full: Client, processing: Engine, fields: dict[str, Any]
) -> None:
    body = {**FIELDS, **fields}
    wanted = {**body, "stop": [body["stop"]] if "stop" in body else []}
    if "logit_bias" in body:
        wanted["logit_bias"] = {int(key): value for key, value in body["logit_bias"].items()}
    (expected,) = processing.generate(["abc"], SamplingParams(**wanted))
    assert full.complete("abc", **body)["choices"][0]["text"] == expected.text


def test_completions_tell_logprobs(full: Client, processing: Engine) -> None:
    (expected,) = processing.generate(["abc"], SamplingParams(**FIELDS, logprobs=2))
    assert expected.logprobs is not None
    (choice,) = full.complete("abc", logprobs=2, **FIELDS)["choices"]
    told = choice["logprobs"]
    assert told["token_logprobs"] == [each.logprob for each in expected.logprobs]
    texts = [TOKENIZER.decode([token], skip_special_tokens=False) for token in expected.token_ids]
    assert told["tokens"] == texts
    assert told["text_offset"][:3] == [0, len(texts[0]), len(texts[0]) + len(texts[1])]
    for best, own, text in zip(
        told["top_logprobs"], told["token_logprobs"], told["tokens"], strict=True
    ):
        assert best[text] == own == max(best.values())  # greedy
    events = full.events(PATH, {"prompt": "abc", "logprobs": 2, **FIELDS})
    pieces = [event["choices"][0]["logprobs"] for event in events]
    for name, values in told.items():
        assert [value for piece in pieces for value in piece[name]] == values


def test_echo_tells_logprobs_of_the_prompt(full: Client, processing: Engine) -> None:
    params = SamplingParams(**FIELDS, logprobs=1, prompt_logprobs=1)
    (expected,) = processing.generate(["abc"], params)
    assert expected.prompt_logprobs is not None
    body = {"prompt": "abc", "logprobs": 1, "echo": True, **FIELDS}
    (choice,) = full.complete(**body)["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "abc" + expected.text
    assert told["tokens"][:3] == ["a", "b", "c"]
    assert told["text_offset"][:4] == [0, 1, 2, 3]
    own = [None, *[each.logprob for each in expected.prompt_logprobs[1:] if each is not None]]
    assert told["token_logprobs"][:3] == own
    assert told["top_logprobs"][0] is None
    assert len(told["tokens"]) == 3 + 6
    (event,) = full.events(PATH, body)
    assert event["choices"][0] == choice


def test_openai_client_reads_logprobs_of_chats(full: Client) -> None:
    user = {"role": "user", "content": "hi"}
    fields: dict[str, Any] = {"model": MODEL, "messages": [user], "max_tokens": 4, "temperature": 0}
    fields |= {"logprobs": True, "top_logprobs": 3}
    with openai.OpenAI(base_url=f"{full.url}/v1", api_key="-", max_retries=0) as ai:
        answer = ai.chat.completions.create(**fields)
        chunks = list(ai.chat.completions.create(**fields, stream=True))
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(each.top_logprobs) == 3 for each in content)
    assert content[0].top_logprobs[0].logprob == content[0].logprob <= 0
    told = [c for chunk in chunks if (own := chunk.choices[0].logprobs) for c in own.content]
    assert told == content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"min_tokens": 99, "max_tokens": 5}, "min_tokens"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_wrong_values_are_named(full: Client, fields: dict[str, Any], param: str) -> None:
    assert (full.refused({"prompt": "a", **fields})["param"] or "").startswith(param)


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "root ::="}}, "structured_outputs", "grammar"),
        ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs", "json_schema"),
        ({"response_format": _schema_format({"type": 5})}, "response_format", "json_schema"),
    ],
)
def test_what_is_no_grammar_is_refused_by_field(
    full: Client, fields: dict[str, Any], param: str, kind: str
) -> None:
    pytest.importorskip("xgrammar")
    error = full.refused({"prompt": "a", **fields})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: {kind}: got a text that is no grammar")
    full.complete("a", max_tokens=2)


def test_a_grammar_that_takes_too_long_is_refused_by_field(
    full: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(grammar, "_SECONDS", -1.0)
    body = {"prompt": "a", "structured_outputs": {"regex": "[0-9]{3}"}}
    message = "structured_outputs: got a grammar that takes too long to follow"
    error = full.refused(body)
    assert (error["message"], error["param"]) == (message, "structured_outputs")
    assert full.events(PATH, body)[-1]["error"]["message"] == message
    full.complete("a", max_tokens=2)


def test_top_logprobs_need_logprobs(full: Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}
    assert full.refused(body, "/v1/chat/completions")["param"] == "top_logprobs"


def test_bytes_of_a_chat_join_to_its_text(full: Client) -> None:
    pytest.importorskip("xgrammar")
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "structured_outputs": {"choice": ["é漢😀"]},
        "logprobs": True,
        "temperature": 0,
    }
    status, document = full.post("/v1/chat/completions", body)
    assert status == 200
    (choice,) = document["choices"]
    assert choice["message"]["content"] == "é漢😀"
    *content, end = choice["logprobs"]["content"]
    assert end["token"] == "<|endoftext|>"
    assert [each["bytes"] for each in content] == [[byte] for byte in "é漢😀".encode()]


def test_texts_have_the_form_that_is_asked_for(full: Client) -> None:
    pytest.importorskip("xgrammar")
    fields = {"max_tokens": 60, "temperature": 1.0, "seed": 3}

    def text(**more: Any) -> str:
        return str(full.complete("a", **fields, **more)["choices"][0]["text"])

    assert text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    number = text(structured_outputs={"regex": "[0-9]{3}"})
    assert number.isdigit()
    assert len(number) == 3
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert set(json.loads(text(response_format=_schema_format(schema)))) == {"a"}
