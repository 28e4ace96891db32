"""Sampling parameters are checked when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ostinato.engine import SamplingParams, StructuredOutput


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 0, "at least 1"),
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", math.nan, "a finite number >= 0"),
        ("temperature", math.inf, "a finite number >= 0"),
        ("top_k", -1, "0 .off. or more"),
        ("top_k", 2**31, "0 .off. or more"),
        ("top_p", 0.0, "a number in .0, 1."),
        ("top_p", 1.01, "a number in .0, 1."),
        ("top_p", math.nan, "a number in .0, 1."),
        ("min_p", -0.5, "a number in .0, 1."),
        ("min_p", 1.5, "a number in .0, 1."),
        ("repetition_penalty", 0.0, "a finite number > 0"),
        ("repetition_penalty", math.inf, "a finite number > 0"),
        # Logits are fp32, in which these are infinite or zero.
        ("repetition_penalty", 1e39, "a finite number > 0"),
        ("repetition_penalty", 1e-46, "a finite number > 0"),
        ("temperature", 1e39, "a finite number >= 0"),
        pytest.param("temperature", 10**400, "a finite number >= 0", id="temperature-huge"),
        ("seed", -1, "None or in"),
        ("seed", 2**63, "None or in"),
        ("stop", ("a", ""), "no empty string"),
        ("presence_penalty", 2.1, "a number in .-2, 2."),
        ("presence_penalty", math.nan, "a number in .-2, 2."),
        ("frequency_penalty", -2.1, "a number in .-2, 2."),
        ("logprobs", -1, "None or 0 to 20"),
        ("logprobs", 21, "None or 0 to 20"),
        ("prompt_logprobs", 21, "None or 0 to 20"),
        ("min_tokens", -1, "0 to max_tokens = 128"),
        ("min_tokens", 129, "0 to max_tokens = 128"),
        ("logit_bias", {5: 101}, "a number in .-100, 100."),
        ("logit_bias", {5: math.nan}, "a number in .-100, 100."),
    ],
)
def test_values_out_of_range_are_named(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got .*, expected {expected}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 2.5, "int"),
        ("max_tokens", "5", "int"),
        ("max_tokens", True, "int"),
        ("ignore_eos", "false", "bool"),
        ("ignore_eos", 1, "bool"),
        ("temperature", "x", "int or float"),
        ("temperature", None, "int or float"),
        ("top_k", 2.7, "int"),
        ("seed", 1.5, "int or None"),
        ("stop", "end", "a sequence of str"),
        ("stop", None, "a sequence of str"),
        ("stop", (1,), "str"),
        ("stop_token_ids", 5, "a sequence of int"),
        ("stop_token_ids", ("a",), "int"),
        ("stop_token_ids", (2.0,), "int"),
        ("presence_penalty", "1", "int or float"),
        ("frequency_penalty", None, "int or float"),
        ("logprobs", 2.0, "int or None"),
        ("logprobs", True, "int or None"),
        ("prompt_logprobs", "all", "int or None"),
        ("min_tokens", None, "int"),
        ("include_stop_str_in_output", 1, "bool"),
        ("logit_bias", [(1, 2.0)], "Mapping"),
        ("logit_bias", {"1": 2.0}, "int"),
        ("logit_bias", {1: "2"}, "int or float"),
        ("structured", {"regex": "a"}, "StructuredOutput or None"),
    ],
)
def test_values_of_the_wrong_type_are_named(name: str, value: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: got .*, expected {expected}$"):
        SamplingParams(**{name: value})


def test_lists_are_copied() -> None:
    stop = ["end"]
    params = SamplingParams(stop=stop)
    stop.append("")
    assert params.stop == ("end",)
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1000.0
    assert params.logit_bias == {1: 2.0}


def test_params_can_be_keys() -> None:
    params = SamplingParams(logit_bias={1: 2.0})
    assert len({params, SamplingParams(logit_bias={1: 2.0}), SamplingParams()}) == 2


@pytest.mark.parametrize("changes", [{"min_tokens": 5}, {"ignore_eos": True}], ids=str)
def test_structured_texts_end_by_their_grammar(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}: got .* with structured, expected"):
        SamplingParams(structured=StructuredOutput(regex="a"), **changes)


def test_limits_themselves_are_accepted() -> None:
    SamplingParams(max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    SamplingParams(top_k=2**31 - 1, top_p=1e-6, min_p=1.0, seed=2**63 - 1)
