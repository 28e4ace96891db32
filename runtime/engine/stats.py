"""What an engine did, in numbers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_STEPS_KEPT = 100_000


def _recent() -> deque[float]:
    return deque(maxlen=_STEPS_KEPT)


@dataclass
class EngineStats:
    """Counts and times since the engine was made.

    `prefill_seconds` and `decode_seconds` are wall-clock times of the last 100,000 steps of each
    kind; `decode_tokens` counts the tokens that were handed out behind each text's first;
    `failed_requests` those that ended with `FinishReason.ERROR`.
    """

    prefill_seconds: deque[float] = field(default_factory=_recent)
    prefill_tokens: int = 0
    decode_seconds: deque[float] = field(default_factory=_recent)
    decode_tokens: int = 0
    preemptions: int = 0
    failed_requests: int = 0
