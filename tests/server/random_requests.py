"""Random requests of /v1/completions, and what `Engine.generate` is asked for the same texts."""

from __future__ import annotations

import random
from typing import Any

from ostinato.engine import SamplingParams, StructuredOutput


def random_prompt(draw: random.Random) -> str:
    return "".join(draw.choice("abc é日\n") for _ in range(draw.randint(1, 40)))


def random_fields(draw: random.Random, most_tokens: int = 24) -> dict[str, Any]:
    """Return random fields of a request, always with a seed."""
    fields: dict[str, Any] = {
        "max_tokens": draw.randint(1, most_tokens),
        "seed": draw.randrange(2**40),
        "temperature": draw.choice([0, 0.7, 1.0, 1.5]),
    }
    optional: dict[str, Any] = {
        "top_p": draw.choice([0.5, 0.95]),
        "top_k": draw.choice([-1, 0, 5]),
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "stop": draw.choice(["e", ["a", "xyz"]]),
        "stop_token_ids": [draw.randrange(256)],
        "ignore_eos": True,
    }
    return fields | {name: value for name, value in optional.items() if draw.random() < 0.3}


def processed_fields(draw: random.Random) -> dict[str, Any]:
    """Return random fields that only an engine with `logits_processing` serves."""
    optional: dict[str, Any] = {
        "presence_penalty": draw.choice([-0.5, 1.5]),
        "frequency_penalty": 0.7,
        "logit_bias": {str(draw.randrange(256)): draw.choice([-100.0, 5.0])},
        "include_stop_str_in_output": True,
        "logprobs": draw.randrange(4),
        "structured_outputs": {"regex": draw.choice(["[a-c]{2,9}", "(yes|no), [0-9]+"])},
    }
    found = {name: value for name, value in optional.items() if draw.random() < 0.25}
    if "structured_outputs" in found:
        found["ignore_eos"] = False  # its end is part of the form
    return found


def params_of(fields: dict[str, Any]) -> SamplingParams:
    """Return what the engine is asked for the text of a request."""
    given = {**fields, "top_k": max(0, fields.get("top_k", 0))}
    stop = fields.get("stop", [])
    given["stop"] = [stop] if isinstance(stop, str) else stop
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    if "structured_outputs" in given:
        given["structured"] = StructuredOutput(**given.pop("structured_outputs"))
    return SamplingParams(**given)
