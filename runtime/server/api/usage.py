"""How answers say how many tokens there were, and why a text has ended."""

from __future__ import annotations

from typing import Any

from ...engine import TokenEvent
from ..generation import Generation


def usage(prompt_tokens: int, generation: Generation, log: dict[str, Any]) -> dict[str, int]:
    """Return the `usage` of an answer, which the log of the request gets, too.

    Args:
        prompt_tokens: of all prompts, each counted once.
        generation: that has ended.
        log: fields of the request's line.
    """
    completion_tokens = sum(generation.completion_tokens)
    log.update(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def finish_reason(event: TokenEvent) -> str | None:
    """Return why a text ends with this event, "stop" or "length"; None where it goes on."""
    return None if event.finish_reason is None else event.finish_reason.value
