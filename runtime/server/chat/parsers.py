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
    "qwen3": HERMES,
    "smollm3": HERMES,
    "seed_oss": HERMES,
    "exaone4": HERMES,
    "llama": JSON,
    "mistral": JSON,
    "ministral": JSON,
    "ministral3": JSON,
    "granite": JSON,
}
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
    def named(tools: str, reasoning: str, *, family: str, thinks: bool) -> Parsers:
        """Return the parsers of these names.

        Args:
            tools: a parser's name, "none", or "auto" for that of the family.
            reasoning: likewise; "auto" asks the chat template.
            family: of the model, in `ostinato.models`.
            thinks: whether the chat template speaks of <think>.

        Raises:
            ValueError: for a name that is none.
        """
        own = Parsers(_TOOLS.get(family), THINK if thinks else None)
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
