"""The flags of `SamplingParams`: one each, under the same name.

But for biases, log-probabilities and structured texts, which only the Python API has.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .command import as_utf8, comma_separated

if TYPE_CHECKING:
    from ..engine import SamplingParams

_FLAGS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N", "help": "tokens per text at most (default 128)"},
    "temperature": {"type": float, "metavar": "T", "help": "0 is greedy (default 0.0)"},
    "top_k": {"type": int, "metavar": "K", "help": "keep the K likeliest tokens (default 0: all)"},
    "top_p": {
        "type": float,
        "metavar": "P",
        "help": "keep the likeliest tokens whose probabilities add up to P (default 1.0)",
    },
    "min_p": {
        "type": float,
        "metavar": "P",
        "help": "drop tokens less likely than P times the likeliest (default 0.0)",
    },
    "repetition_penalty": {
        "type": float,
        "metavar": "R",
        "help": "above 1, make tokens that have occurred less likely (default 1.0)",
    },
    "presence_penalty": {
        "type": float,
        "metavar": "P",
        "help": "subtract P from the logits of tokens of the text so far (default 0.0)",
    },
    "frequency_penalty": {
        "type": float,
        "metavar": "P",
        "help": "subtract P as often as the text has the token (default 0.0)",
    },
    "min_tokens": {
        "type": int,
        "metavar": "N",
        "help": "end no text before N tokens (default 0)",
    },
    "seed": {
        "type": int,
        "metavar": "S",
        "help": "of the first prompt; the next ones use S + 1, S + 2, ... (default: drawn)",
    },
    "stop": {
        "action": "append",
        "type": as_utf8,
        "metavar": "TEXT",
        "help": "end a text before TEXT; may be repeated",
    },
    "stop_token_ids": {
        "type": comma_separated,
        "metavar": "IDS",
        "help": "end a text at these token ids, separated by commas",
    },
    "include_stop_str_in_output": {
        "action": "store_true",
        "help": "end a text behind what stops it, not before",
    },
    "ignore_eos": {"action": "store_true", "help": "go on after an end-of-sequence token"},
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags. One that is not given leaves no attribute: the defaults are the class's."""
    group = parser.add_argument_group("sampling")
    for name, options in _FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, **options)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the parameters that the flags ask for.

    Raises:
        ValueError: when one is outside its range.
    """
    from ..engine import SamplingParams

    given: dict[str, Any] = {name: getattr(args, name) for name in _FLAGS if hasattr(args, name)}
    for name in given.keys() & {"stop", "stop_token_ids"}:
        given[name] = tuple(given[name])
    return SamplingParams(**given)
