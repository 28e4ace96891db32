"""What a caller asks of one generation, and what comes back."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType


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
        seed: of this request's own random numbers, in [0, 2**63); None draws one.
        stop: strings that end the text, which is cut before the one that is complete first. One
            that is a special token, which adds no text, ends it as an id does.
        stop_token_ids: ids that end the text, besides the model's end-of-sequence ids. The text
            ends before them, too; `token_ids` has them.
        ignore_eos: go on after an end-of-sequence id.

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
        }
        for name, (holds, expected) in ranges.items():
            value = getattr(self, name)
            if not holds:
                raise ValueError(f"{name}: got {value!r}, expected {expected}")

    def _check_types(self) -> None:
        kinds: dict[str, type | tuple[type, ...]] = {
            "max_tokens": int,
            "temperature": (int, float),
            "top_k": int,
            "top_p": (int, float),
            "min_p": (int, float),
            "repetition_penalty": (int, float),
            "seed": (int, NoneType),
        }
        if not isinstance(self.ignore_eos, bool):
            raise _wrong_type("ignore_eos", self.ignore_eos, bool)
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
    ERROR = "error"  # the model's logits are NaN


@dataclass(frozen=True)
class TokenEvent:
    """One generated token of one request.

    `text` is what the token adds to the text shown so far: "" while a character is incomplete or
    might begin a stop string. `finish_reason` is set on a request's last event, which has no token
    (`token_id` None) if the request was cancelled or failed.
    """

    request_id: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """The finished text of one request; `seed` reproduces it."""

    request_id: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
