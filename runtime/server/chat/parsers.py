"""Which parsers of tool calls and reasoning a family's texts need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Tool calls between tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
HERMES = "hermes"
# A text that is one call, or a list of them, and nothing else: with "arguments" or "parameters".
JSON = "json"

# Reasoning between <think> and </think>.
THINK = "think"

_TOOLS = {
    "qwen2": HERMES,
    "qwen2_moe": HERMES,
    "qwen2_vl_text": HERMES,
    "qwen2_5_vl_text": HERMES,
    "qwen3": HERMES,
    "qwen3_moe": HERMES,
    "qwen3_vl_text": HERMES,
    "qwen3_vl_moe_text": HERMES,
    "smollm3": HERMES,
    "seed_oss": HERMES,
    "exaone4": HERMES,
    "llama": JSON,
    "mistral": JSON,
    "ministral": JSON,
    "ministral3": JSON,
    "mixtral": JSON,
    "granite": JSON,
    "granitemoe": JSON,
}
# What templates have of calls that are no JSON, such as those of Qwen3-Coder.
_OTHER_CALLS = ("<function=", "<arg_key>")
AUTO, NONE = "auto", "none"
# Also as vLLM names them.
_TOOL_NAMES = {
    "hermes": HERMES,
    "qwen": HERMES,
    "json": JSON,
    "llama3_json": JSON,
    "mistral": JSON,
    "granite": JSON,
}
_REASONING_NAMES = {"think": THINK, "qwen3": THINK, "deepseek_r1": THINK}


@dataclass(frozen=True)
class Parsers:
    """How texts are read; None leaves them as they are.

    Args:
        tools: HERMES or JSON.
        reasoning: THINK.
    """

    tools: str | None = None
    reasoning: str | None = None

    @staticmethod
    def named(tools: str, reasoning: str, *, family: str, template: str) -> Parsers:
        """Return the parsers of these names.

        Args:
            tools: a parser's name, "none", or "auto" for that of the family; none where the chat
                template shows calls of another form.
            reasoning: likewise; "auto" is THINK where the chat template speaks of <think>.
            family: of the model, in `ostinato.models`.
            template: the text of the chat template, "" without one.

        Raises:
            ValueError: for a name that is none.
        """
        thinks = "<think>" in template or "</think>" in template
        others = any(tag in template for tag in _OTHER_CALLS)
        own = Parsers(None if others else _TOOLS.get(family), THINK if thinks else None)
        return Parsers(
            _parser("tool_call_parser", tools, _TOOL_NAMES, own.tools),
            _parser("reasoning_parser", reasoning, _REASONING_NAMES, own.reasoning),
        )


def _parser(argument: str, name: str, names: Mapping[str, str], auto: str | None) -> str | None:
    if name == AUTO:
        return auto
    if name == NONE:
        return None
    if name not in names:
        known = ", ".join([AUTO, NONE, *names])
        raise ValueError(f"{argument}: got {name!r}, expected one of {known}")
    return names[name]
