"""What an engine did, in numbers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_STEPS_KEPT = 100_000


class StepTimes(deque[float]):
    """Seconds of the last 100,000 steps.

    Attributes:
        steps, total: how many, and their seconds, since the engine was made.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=_STEPS_KEPT)
        self.steps = 0
        self.total = 0.0

    def append(self, seconds: float) -> None:
        """Add a step."""
        super().append(seconds)
        self.steps += 1
        self.total += seconds


@dataclass
class EngineStats:
    """Counts and times since the engine was made.

    `prefill_seconds` and `decode_seconds` are wall-clock times of the steps that compute prompts
    and of those that decode; a step that does both has its time in both. `decode_tokens` counts the
    tokens that were handed out behind each text's first; `failed_requests` those that ended with
    `FinishReason.ERROR`.
    """

    prefill_seconds: StepTimes = field(default_factory=StepTimes)
    prefill_tokens: int = 0
    decode_seconds: StepTimes = field(default_factory=StepTimes)
    decode_tokens: int = 0
    preemptions: int = 0
    failed_requests: int = 0
