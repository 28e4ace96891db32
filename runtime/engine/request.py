"""The life of one request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..models import SwappedSequence
from .detokenizer import Detokenizer
from .logprobs import HostLogprobs, TokenLogprobs
from .sampling_params import Completion, FinishReason, SamplingParams, TokenEvent
from .structured.grammar import Matcher


@dataclass
class Request:
    """A prompt on its way to a text.

    `computed` counts the prompt tokens whose keys and values are in the cache; `swapped` holds
    the sequence while it has been preempted; `slot` is its row of per-request device state;
    `async_tokens` counts tokens that are sampled on the device and not in `generated` yet;
    `forbidden_ids` are not sampled before `min_tokens`; `matcher` follows the text's grammar;
    `prompt_rows` has log-probabilities by the position of their chunk in the prompt.
    """

    id: int
    prompt: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    forbidden_ids: frozenset[int] = frozenset()
    matcher: Matcher | None = None
    generated: list[int] = field(default_factory=list)
    async_tokens: int = 0
    computed: int = 0
    slot: int = -1
    marked: bool = False  # whether its tokens, and none else, are marked as seen in its slot
    swapped: SwappedSequence | None = None
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_rows: dict[int, list[HostLogprobs]] = field(default_factory=dict)

    @property
    def processes_logits(self) -> bool:
        """Whether some step must process the request's logits."""
        return self.sampling_params.processes_logits or bool(self.forbidden_ids)

    @property
    def needs_processing(self) -> bool:
        """Whether the next step must."""
        params = self.sampling_params
        return params.processes_logits or (
            bool(self.forbidden_ids) and self.sampled < params.min_tokens
        )

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

    def accept(self, token: int, logprobs: TokenLogprobs | None = None) -> TokenEvent:
        """Add a sampled token, decide whether it is the last, and return its event."""
        params, count = self.sampling_params, len(self.generated)
        stops, fills = token in self.stop_ids, count + 1 == self.max_new_tokens
        if self.matcher is not None and not self.matcher.accept(token):
            return self.fail()
        try:
            if stops and not params.include_stop_str_in_output:
                text = self.detokenizer.finish()
            else:
                last, stoppable = fills or stops, count + 1 > params.min_tokens
                text = self.detokenizer.push(token, last=last, stoppable=stoppable)
        except BaseException:  # of the tokenizer: nothing has changed then
            if self.matcher is not None:
                self.matcher.undo()
            raise
        self.generated.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if stops or self.detokenizer.stopped:
            self.finish_reason = FinishReason.STOP
        elif fills:
            self.finish_reason = FinishReason.LENGTH
        return TokenEvent(self.id, token, text, self.finish_reason, logprobs)

    def cancel(self) -> TokenEvent:
        """End the request where it stands and return its last event."""
        return self._end(FinishReason.CANCELLED)

    def fail(self) -> TokenEvent:
        """End the request, whose next token nobody knows, and return its last event."""
        fault = None if self.matcher is None else self.matcher.fault()
        error = "the model's logits are NaN" if fault is None else f"structured: {fault}"
        return self._end(FinishReason.ERROR, error)

    def _end(self, reason: FinishReason, error: str | None = None) -> TokenEvent:
        self.finish_reason = reason
        return TokenEvent(self.id, None, self.detokenizer.finish(), reason, error=error)

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
            logprobs=None if self.sampling_params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        wanted = self.sampling_params.prompt_logprobs
        if wanted is None or not self.generated:  # then their copies may be under way
            return None
        rows = [row for _, chunk in sorted(self.prompt_rows.items()) for row in chunk]
        return (None, *(part.read(at, wanted) for part in rows for at in range(len(part))))
