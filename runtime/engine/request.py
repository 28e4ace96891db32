"""The life of one request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..models import SwappedSequence
from .detokenizer import Detokenizer
from .sampling_params import Completion, FinishReason, SamplingParams, TokenEvent


@dataclass
class Request:
    """A prompt on its way to a text.

    `computed` counts the prompt tokens whose keys and values are in the cache; `swapped` holds
    the sequence while it has been preempted; `slot` is its row of per-request device state;
    `async_tokens` counts tokens that are sampled on the device and not in `generated` yet.
    """

    id: int
    prompt: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    generated: list[int] = field(default_factory=list)
    async_tokens: int = 0
    computed: int = 0
    slot: int = -1
    marked: bool = False  # whether its tokens, and none else, are marked as seen in its slot
    swapped: SwappedSequence | None = None
    finish_reason: FinishReason | None = None

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is in the cache, so that decode steps can follow."""
        return self.computed == len(self.prompt)

    @property
    def length(self) -> int:
        """Tokens whose keys and values a decode step needs: all but the last sampled one."""
        return len(self.prompt) + max(self.sampled - 1, 0)

    @property
    def sampled(self) -> int:
        """Tokens that have been sampled, read by the host or not."""
        return len(self.generated) + self.async_tokens

    @property
    def final_length(self) -> int:
        """Tokens whose keys and values are in the cache at most, before the last is sampled."""
        return len(self.prompt) + self.max_new_tokens - 1

    def accept(self, token: int) -> TokenEvent:
        """Add a sampled token, decide whether it is the last, and return its event."""
        stops, fills = token in self.stop_ids, len(self.generated) + 1 == self.max_new_tokens
        # If the tokenizer fails nothing has changed.
        text = self.detokenizer.finish() if stops else self.detokenizer.push(token, last=fills)
        self.generated.append(token)
        if stops or self.detokenizer.stopped:
            self.finish_reason = FinishReason.STOP
        elif fills:
            self.finish_reason = FinishReason.LENGTH
        return TokenEvent(self.id, token, text, self.finish_reason)

    def cancel(self) -> TokenEvent:
        """End the request where it stands and return its last event."""
        return self._end(FinishReason.CANCELLED)

    def fail(self) -> TokenEvent:
        """End the request, whose next token nobody knows, and return its last event."""
        return self._end(FinishReason.ERROR)

    def _end(self, reason: FinishReason) -> TokenEvent:
        self.finish_reason = reason
        return TokenEvent(self.id, None, self.detokenizer.finish(), reason)

    def completion(self) -> Completion:
        """Return the result of a finished request."""
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.id} has not finished")
        return Completion(
            request_id=self.id,
            prompt_tokens=len(self.prompt),
            token_ids=tuple(self.generated),
            text=self.detokenizer.text,
            finish_reason=self.finish_reason,
            seed=self.seed,
        )
