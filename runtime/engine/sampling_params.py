"""What a caller asks of one generation, and what comes back."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import NoneType

from .logprobs import MOST_LOGPROBS, TokenLogprobs
from .structured.output import StructuredOutput

# Fields that need an engine made with `logits_processing=True`.
PROCESSED_FIELDS = frozenset(
    {
        *("presence_penalty", "frequency_penalty", "logit_bias"),
        *("logprobs", "prompt_logprobs", "min_tokens", "structured"),
    }
)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Args:
        max_tokens: tokens to generate at most, >= 1; the context may end the text earlier.
        temperature: >= 0; 0 is greedy.
        top_k: keep the k likeliest tokens, 0 for all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this share of the likeliest, in [0, 1].
        repetition_penalty: > 0; above 1 makes tokens of prompt and text less likely
            (CTRL, arXiv 1909.05858).
        presence_penalty: in [-2, 2]; subtracted from the logits of tokens of the text so far.
        frequency_penalty: in [-2, 2]; subtracted as often as the text has the token.
        logit_bias: token ids and what is added to their logits, in [-100, 100].
        logprobs: how many of the best tokens to report, 0 to 20, with their log-probabilities and
            that of each sampled token; None reports nothing.
        prompt_logprobs: the same for each token of the prompt, which is then computed whole: it
            shares no prefix.
        min_tokens: before so many, no token that ends the text is sampled, and no stop string is
            looked for.
        structured: a form that the text has, from its first token on.
        seed: of this request's own random numbers, in [0, 2**63); None draws one.
        stop: strings that end the text, which is cut before the one that is complete first. One
            that is a special token, which adds no text, ends it as an id does.
        stop_token_ids: ids that end the text, besides the model's end-of-sequence ids. The text
            ends before them, too; `token_ids` has them.
        ignore_eos: go on after an end-of-sequence id.
        include_stop_str_in_output: end the text behind the stop string, or stop id, not before it.

    The fields from `presence_penalty` to `structured` need an engine made with
    `logits_processing=True`.

    Raises:
        ValueError: when a value is outside its range, naming it.
        TypeError: when a value is of the wrong type, naming it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._check_types()
        ranges = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= _as_fp32(self.temperature) < math.inf, "a finite number >= 0"),
            "top_k": (0 <= self.top_k < 2**31, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "a number in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "a number in [0, 1]"),
            "repetition_penalty": (
                0 < _as_fp32(self.repetition_penalty) < math.inf,
                "a finite number > 0",
            ),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "None or in [0, 2**63)"),
            "stop": (all(self.stop), "no empty string"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "a number in [-2, 2]"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "a number in [-2, 2]"),
            "logprobs": (_is_count(self.logprobs), f"None or 0 to {MOST_LOGPROBS}"),
            "prompt_logprobs": (_is_count(self.prompt_logprobs), f"None or 0 to {MOST_LOGPROBS}"),
            "min_tokens": (
                0 <= self.min_tokens <= self.max_tokens,
                f"0 to max_tokens = {self.max_tokens}",
            ),
        }
        for name, (holds, expected) in ranges.items():
            value = getattr(self, name)
            if not holds:
                raise ValueError(f"{name}: got {value!r}, expected {expected}")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise ValueError(
                    f"logit_bias: got {bias!r} for token {token}, expected a number in [-100, 100]"
                )
        if self.structured is not None:
            # A grammar ends the text by an end-of-sequence id, where it allows no other token.
            for name in ("min_tokens", "ignore_eos"):
                value = getattr(self, name)
                if value:
                    raise ValueError(
                        f"{name}: got {value!r} with structured, expected {type(value)(0)!r}"
                    )

    def _check_types(self) -> None:
        kinds: dict[str, type | tuple[type, ...]] = {
            "max_tokens": int,
            "temperature": (int, float),
            "top_k": int,
            "top_p": (int, float),
            "min_p": (int, float),
            "repetition_penalty": (int, float),
            "seed": (int, NoneType),
            "presence_penalty": (int, float),
            "frequency_penalty": (int, float),
            "logprobs": (int, NoneType),
            "prompt_logprobs": (int, NoneType),
            "min_tokens": int,
            "structured": (StructuredOutput, NoneType),
        }
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, getattr(self, name), bool)
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise _wrong_type(name, value, kind)
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str | bytes):
                raise TypeError(f"{name}: got {values!r}, expected a sequence of {kind.__name__}")
            for value in values:
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise _wrong_type(name, value, kind)
            # A list could change while the request runs.
            object.__setattr__(self, name, tuple(values))
        if not isinstance(self.logit_bias, Mapping):
            raise _wrong_type("logit_bias", self.logit_bias, Mapping)
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or isinstance(token, bool):
                raise _wrong_type("logit_bias", token, int)
            if not isinstance(bias, int | float) or isinstance(bias, bool):
                raise _wrong_type("logit_bias", bias, (int, float))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def processed_fields(self) -> list[str]:
        """The given fields that need an engine made with `logits_processing=True`."""
        default = SamplingParams()
        names = sorted(PROCESSED_FIELDS)
        return [name for name in names if getattr(self, name) != getattr(default, name)]

    @property
    def processes_logits(self) -> bool:
        """Whether a step that processes logits is needed, but for `min_tokens`."""
        return (
            self.logprobs is not None
            or self.structured is not None
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or any(self.logit_bias.values())
        )


def _is_count(value: int | None) -> bool:
    return value is None or 0 <= value <= MOST_LOGPROBS


def _as_fp32(value: float) -> float:
    """Return a number as logits see it, which are fp32: rounded, beyond their range infinite."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return rounded


def _wrong_type(name: str, value: object, kind: type | tuple[type, ...]) -> TypeError:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = " or ".join("None" if k is NoneType else k.__name__ for k in kinds)
    return TypeError(f"{name}: got {value!r}, expected {expected}")


class FinishReason(StrEnum):
    """Why a text ended."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"  # the logits are NaN, or the grammar has no token to go on or takes too long


@dataclass(frozen=True)
class TokenEvent:
    """One generated token of one request.

    `text` is what the token adds to the text shown so far: "" while a character is incomplete or
    might begin a stop string. `finish_reason` is set on a request's last event, which has no token
    (`token_id` None) if the request was cancelled or failed. `logprobs` is there where it was asked
    for. `error` says of a failed request why; it begins with "structured:" where that is the fault
    of its grammar.
    """

    request_id: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """The finished text of one request; `seed` reproduces it.

    `logprobs` has an item for each of `token_ids`, `prompt_logprobs` one for each token of the
    prompt, of which the first has None. Where they were not asked for, or a request ended before
    its first token, they are None.
    """

    request_id: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
