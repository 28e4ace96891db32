"""/v1/chat/completions, and the openai client, which knows nothing of this server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ostinato.engine import SamplingParams
from ostinato.engine.detokenizer import Detokenizer
from ostinato.server import Settings
from ostinato.server.chat.parsers import HERMES, THINK, Parsers
from ostinato.server.chat.render import ChatTemplate
from serving import CHATML, MODEL, TOKENIZER, Client, make_engine, make_service, serving
from tiny import tiny_llama

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
FIELDS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 3}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def chat() -> Iterator[Client]:
    """Serve a model with a template, tools and reasoning, and 512 tokens of context."""
    model = tiny_llama(max_position_embeddings=512)
    service = make_service(
        lambda: make_engine(model=model),
        template=ChatTemplate({"default": CHATML}, {}, 10.0),
        parsers=Parsers(HERMES, THINK),
        settings=Settings(port=0, api_keys=("key",)),
    )
    with serving(service) as client:
        client.headers = {"authorization": "Bearer key"}
        yield client


@pytest.fixture
def ai(chat: Client) -> Iterator[openai.OpenAI]:
    """Return the client of OpenAI."""
    with openai.OpenAI(base_url=f"{chat.url}/v1", api_key="key", max_retries=0) as it:
        yield it


def _text(prompt: str, **fields: Any) -> str:
    engine = make_engine(model=tiny_llama(max_position_embeddings=512))
    return engine.generate([prompt], SamplingParams(**{**FIELDS, **fields}))[0].text


def test_fields_may_be_null(ai: openai.OpenAI, chat: Client) -> None:
    nulls = {"stream": None, "stream_options": None, "tools": None, "n": None, "logprobs": None}
    answer = ai.chat.completions.create(model=MODEL, messages=[USER], **FIELDS, **nulls)
    assert answer.choices[0].message.content == _text(PROMPT)
    more = {"add_generation_prompt": None, "add_special_tokens": None, "stream": True}
    more["stream_options"] = {"include_usage": None}
    events = chat.events(PATH, {"messages": [USER], **FIELDS, **more})
    text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
    assert text == _text(PROMPT)


def test_tools_may_be_called_strict(chat: Client) -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    told = [
        chat.post("/tokenize", {"messages": [USER], "tools": [tool]})[1]["tokens"]
        for tool in (TOOL, strict)
    ]
    assert told[0] == told[1]


def test_only_assistants_may_lack_content(chat: Client) -> None:
    for role in ("user", "system", "tool"):
        error = chat.refused({"messages": [{"role": role}]}, PATH)
        assert error["message"] == f"messages: got a message of {role!r} without content"
    told = chat.post("/tokenize", {"messages": [USER, {"role": "assistant", "content": None}]})[1]
    text = TOKENIZER.decode(told["tokens"], skip_special_tokens=False)
    assert "None" not in text


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_with_a_field_of_their_own_are_refused(chat: Client, name: str) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {name: False}}
    error = chat.refused(body, PATH)
    assert error["message"] == f"chat_template_kwargs: got {name}, which has a field of its own"


@pytest.mark.parametrize("name", ["self", "variables", "messages_", "tools_"])
def test_template_variables_may_have_any_name(chat: Client, name: str) -> None:
    body = {"messages": [USER], **FIELDS, "chat_template_kwargs": {name: 1}}
    assert chat.post(PATH, body)[0] == 200


def test_a_form_is_content_where_the_template_begins_to_think() -> None:
    pytest.importorskip("xgrammar")
    service = make_service(
        lambda: make_engine(logits_processing=True),
        template=ChatTemplate({"default": "{{ messages[0].content }}<think>\n"}, {}, 10.0),
        parsers=Parsers(None, THINK),
    )
    with serving(service) as client:
        form = {"structured_outputs": {"choice": ["yes", "no"]}}
        status, document = client.post(PATH, {"messages": [USER], "max_tokens": 9, **form})
        assert status == 200
        message = document["choices"][0]["message"]
        assert message["content"] in ("yes", "no")
        assert "reasoning_content" not in message


def test_openai_client_chats(ai: openai.OpenAI) -> None:
    expected = _text(PROMPT)
    answer = ai.chat.completions.create(model=MODEL, messages=[USER], **FIELDS)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(PROMPT).ids)
    # What an answer says can be said again.
    again = [USER, choice.message.model_dump(), USER]
    assert ai.chat.completions.create(model=MODEL, messages=again, **FIELDS).choices


def test_openai_client_streams_a_chat(ai: openai.OpenAI) -> None:
    stream = ai.chat.completions.create(
        model=MODEL, messages=[USER], stream=True, stream_options={"include_usage": True}, **FIELDS
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == _text(PROMPT)
    assert chunks[-1].usage.completion_tokens == 12


def test_openai_client_completes_and_lists(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == [MODEL]
    answer = ai.completions.create(model=MODEL, prompt="abc", **FIELDS)
    assert answer.choices[0].text == _text("abc")
    stream = ai.completions.create(model=MODEL, prompt="abc", stream=True, **FIELDS)
    assert "".join(chunk.choices[0].text for chunk in stream) == _text("abc")


def test_openai_client_knows_our_errors(ai: openai.OpenAI, chat: Client) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown field"):
        ai.chat.completions.create(model=MODEL, messages=[USER], extra_body={"frob": 1})
    with pytest.raises(openai.NotFoundError, match="expected 'tiny'"):
        ai.chat.completions.create(model="gpt-9", messages=[USER])
    with pytest.raises(openai.NotFoundError, match="/v1/responses"):
        ai.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        ai.embeddings.create(model=MODEL, input="hi")
    with pytest.raises(openai.AuthenticationError):
        ai.with_options(api_key="wrong").models.list()


def test_chat_fills_the_context_by_default(chat: Client) -> None:
    long = {"role": "user", "content": "a" * 430}
    status, answer = chat.post(PATH, {"messages": [long], "ignore_eos": True})
    assert status == 200
    assert answer["usage"]["total_tokens"] == 512
    body = {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 2, "ignore_eos": True}
    assert chat.post(PATH, body)[1]["usage"]["completion_tokens"] == 2


def test_content_parts_and_developers_are_rendered(chat: Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    _, tokens = chat.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    text = chat.post("/detokenize", {"tokens": tokens["tokens"]})[1]["prompt"]
    assert text == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"


def _say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let every text of the server begin with this one, since the model cannot call tools."""
    said: dict[Detokenizer, Iterator[str]] = {}

    def push(self: Detokenizer, token: int, **options: bool) -> str:
        pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
        return next(said.setdefault(self, iter(pieces)), "")

    monkeypatch.setattr(Detokenizer, "push", push)
    monkeypatch.setattr(Detokenizer, "finish", lambda self, **options: "")


CALL = '<think>why</think>\n\nSure.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_tool_calls_and_reasoning_are_parsed(
    ai: openai.OpenAI, chat: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _say(monkeypatch, CALL)
    fields = {**FIELDS, "max_tokens": -(-len(CALL) // 7)}
    answer = ai.chat.completions.create(
        model=MODEL, messages=[USER], tools=[TOOL], extra_body={"ignore_eos": True}, **fields
    )
    message = answer.choices[0].message
    assert message.content == "Sure."
    assert message.reasoning_content == "why"
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    stream = ai.chat.completions.create(
        model=MODEL,
        messages=[USER],
        tools=[TOOL],
        stream=True,
        extra_body={"ignore_eos": True},
        **fields,
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "Sure."
    (told,) = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (told.index, told.function.name) == (0, "add")


def test_half_characters_of_a_call_stay_escapes(
    chat: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _say(monkeypatch, CALL.replace('"a": 1', '"a": "\\ud800"'))
    body = {"messages": [USER], "tools": [TOOL], "max_tokens": 20, "ignore_eos": True}
    message = chat.post(PATH, body)[1]["choices"][0]["message"]
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments.isascii()
    assert json.loads(arguments) == {"a": "\ud800"}
    chunks = chat.events(PATH, body)
    (call,) = [c for e in chunks for c in e["choices"][0]["delta"].get("tool_calls", ())]
    assert json.loads(call["function"]["arguments"]) == {"a": "\ud800"}


def test_finish_reason_tells_of_tool_calls(chat: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"max_tokens": 30, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    engine = make_engine(model=tiny_llama(max_position_embeddings=512))
    (text,) = engine.generate([PROMPT], SamplingParams(**fields))
    ids = text.token_ids
    end = next(id for at, id in enumerate(ids) if at > len(CALL) // 7 and id not in ids[:at])
    _say(monkeypatch, CALL)
    body = {"messages": [USER], **fields, "stop_token_ids": [end]}
    reasons = [
        chat.post(PATH, {**body, **more})[1]["choices"][0]["finish_reason"]
        for more in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"})
    ]
    assert reasons == ["stop", "tool_calls", "stop"]


def test_tool_results_are_rendered(chat: Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    assert chat.post(PATH, {"messages": messages, "tools": [TOOL], **FIELDS})[0] == 200
    call["function"]["arguments"] = "{"  # type: ignore[index]
    assert "no JSON" in chat.refused({"messages": messages}, PATH)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, None),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
        ({"messages": [USER], "chat_template": "x"}, "chat_template"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "tools.0"),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER], "n": 129}, "n"),
        ({"messages": [USER], "max_tokens": 600}, "max_tokens"),
        ({"messages": [USER], "functions": []}, "functions"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "prompt"),
    ],
)
def test_wrong_chats_are_refused_by_name(
    chat: Client, fields: dict[str, Any], param: str | None
) -> None:
    error = chat.refused(fields, PATH)
    assert (error["param"] or "").startswith(param or "")


def test_tool_choices_that_are_not_served_are_quoted(chat: Client) -> None:
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}
    message = chat.refused(body, PATH)["message"]
    assert message == "tool_choice: got 'required', expected 'none' or 'auto'"


def test_chat_without_a_template_is_refused(client: Client) -> None:
    assert "no chat template" in client.refused({"messages": [USER]}, PATH)["message"]
