"""Texts as messages: reasoning, content and tool calls, whole and in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.server.chat.message import MessageReader
from ostinato.server.chat.parsers import HERMES, JSON, THINK, Parsers

CALL = '{"name": "add", "arguments": {"a": 1}}'
ADD = ("add", {"a": 1})


def _read(
    pieces: list[str], tools: str | None, *, thinks: bool = False, thinking: bool = False
) -> tuple[str, str, list[tuple[str, object]]]:
    """Return reasoning, content and calls of a text that comes in pieces."""
    parsers = Parsers(tools, THINK if thinks else None)
    reader = MessageReader(parsers, {"add"} if tools else set(), thinking=thinking)
    deltas = [d for p in pieces[:-1] for d in reader.push(p)] + reader.push(pieces[-1], last=True)
    functions = [delta.call["function"] for delta in deltas if delta.call is not None]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    assert reader.calls == len(calls)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


@pytest.mark.parametrize(
    ("text", "tools", "content", "calls"),
    [
        ("hello", None, "hello", []),
        (f"<tool_call>{CALL}</tool_call>", None, f"<tool_call>{CALL}</tool_call>", []),
        (f"<tool_call>\n{CALL}\n</tool_call>", HERMES, "", [ADD]),
        (f"Sure.<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", HERMES, "Sure.",
         [ADD, ADD]),
        (f"<tool_call>{CALL}", HERMES, "", [ADD]),
        ('{"name": ["add"], "arguments": {}}', JSON, '{"name": ["add"], "arguments": {}}', []),
        ('{"name": {"add": 1}}', JSON, '{"name": {"add": 1}}', []),
        ('{"name": "add", "arguments": {"a": 1e999}}', JSON,
         '{"name": "add", "arguments": {"a": 1e999}}', []),
        ('{"name": "add", "arguments": {"a": NaN}}', JSON,
         '{"name": "add", "arguments": {"a": NaN}}', []),
        ("<tool_call>{broken</tool_call>!", HERMES, "<tool_call>{broken</tool_call>!", []),
        ('<tool_call>{"name": "rm"}</tool_call>', HERMES, '<tool_call>{"name": "rm"}</tool_call>',
         []),
        ("\n<tool_call>{broken</tool_call>", HERMES, "\n<tool_call>{broken</tool_call>", []),
        ("\n \n", HERMES, "\n \n", []),
        ("a < b <tool", HERMES, "a < b <tool", []),
        (CALL, JSON, "", [ADD]),
        (f" [{CALL}, {CALL}]", JSON, "", [ADD, ADD]),
        ('{"name": "add", "parameters": {"a": 1}}', JSON, "", [ADD]),
        ('{"name": "other"}', JSON, '{"name": "other"}', []),
        ("[1, 2]", JSON, "[1, 2]", []),
        ("[]", JSON, "[]", []),
        ("see " + CALL, JSON, "see " + CALL, []),
        ("[" * 5000, JSON, "[" * 5000, []),
        ("", JSON, "", []),
        ("", HERMES, "", []),
    ],
)  # fmt: skip
def test_tool_calls_are_read(
    text: str, tools: str | None, content: str, calls: list[object]
) -> None:
    assert _read([text], tools) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>so</think>\n\nyes", False, "so", "yes"),
        ("\n<think>so</think>yes", False, "so", "yes"),
        ("so</think>yes", True, "so", "yes"),
        ("no tags", False, "", "no tags"),
        ("<think>cut off", False, "cut off", ""),
        ("<thin", False, "", "<thin"),
        ("a <think>b", False, "", "a <think>b"),
    ],
)
def test_reasoning_is_read(text: str, thinking: bool, reasoning: str, content: str) -> None:
    assert _read([text], None, thinks=True, thinking=thinking) == (reasoning, content, [])


PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "a", "\n", "[", "]", ","]
)


@given(st.lists(PARTS, max_size=8), st.data())
def test_pieces_make_the_same_message(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    tools = data.draw(st.sampled_from([None, HERMES, JSON]))
    thinks = data.draw(st.booleans())
    thinking = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    _assert_pieces_change_nothing(pieces, tools, thinks=thinks, thinking=thinking)


@pytest.mark.parametrize("tools", [None, HERMES, JSON])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think>\n\nb",
        f"<think>a</think>\n<tool_call>{CALL}</tool_call>",
        f"\n<tool_call>{CALL}</tool_call>\n",
        f"a\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\nb\n",
        f"<tool_call>{CALL}</tool_call>a\n\n<tool_call>{CALL}</tool_call>",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>[</tool_call>\n",
        f"\n{CALL}\n",
        f"\n[{CALL}]\na",
    ],
)
def test_single_characters_make_the_same_message(text: str, thinking: bool, tools: str) -> None:
    _assert_pieces_change_nothing([*text, ""], tools, thinks=True, thinking=thinking)


def _assert_pieces_change_nothing(
    pieces: list[str], tools: str | None, *, thinks: bool, thinking: bool
) -> None:
    whole = _read(["".join(pieces)], tools, thinks=thinks, thinking=thinking)
    assert _read(pieces, tools, thinks=thinks, thinking=thinking) == whole


@given(st.text("abé <>/[{\n", max_size=30), st.data())
def test_texts_without_tags_stay_as_they_are(text: str, data: st.DataObject) -> None:
    tools = data.draw(st.sampled_from([None, HERMES, JSON]))
    assert _read([*text, ""], tools, thinks=True) == ("", text, [])


def test_parsers_have_names_and_families() -> None:
    def named(tools: str, reasoning: str, family: str = "llama", template: str = "") -> Parsers:
        return Parsers.named(tools, reasoning, family=family, template=template)

    assert named("auto", "auto") == Parsers(JSON, None)
    assert named("auto", "auto", "qwen3", "{{ '<think>' }}") == Parsers(HERMES, THINK)
    for family in ("qwen3_moe", "qwen3_vl_text", "qwen2_5_vl_text", "qwen2_moe"):
        assert named("auto", "auto", family, "<tool_call>") == Parsers(HERMES, None)
    coder = "<tool_call>\n<function=name>\n<parameter=key>"
    assert named("auto", "auto", "qwen3_moe", coder) == Parsers()
    assert named("hermes", "auto", "qwen3_moe", coder) == Parsers(HERMES, None)
    assert named("none", "none", "qwen3", "<think>") == Parsers()
    assert named("hermes", "deepseek_r1") == Parsers(HERMES, THINK)
    assert named("auto", "auto", "phi3") == Parsers()
    with pytest.raises(ValueError, match="tool_call_parser: got 'x', expected one of auto"):
        named("x", "auto")
