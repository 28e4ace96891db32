"""What a run of vLLM with the plug-in beside vLLM alone makes of its measurements."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_comparison import agreement, beside, milliseconds, missed

ALL = "linears, attention, norms"


def text(logprobs: list[float], best: list[bool]) -> dict[str, Any]:
    return {"tokens": list(range(len(logprobs))), "logprobs": logprobs, "best": best}


def texts_row(rms: float, **fields: Any) -> dict[str, Any]:
    row = {"section": "texts", "case": "a", "logprob_rms": rms, "logprob_rms_error": 0.001}
    return {**row, **fields}


def test_a_step_is_the_median_of_all_answers() -> None:
    answers = [{"seconds": 0.01 * x} for x in (5, 1, 2)]
    assert milliseconds(answers, 10) == pytest.approx(2.0)


def test_a_row_beside_its_peer_has_the_ratio() -> None:
    assert beside({"us": 80.0}, "vllm", 100.0) == {"us": 80.0, "peer": "vllm", "ratio": 0.8}


def test_texts_are_compared_token_by_token() -> None:
    theirs = [text([-1.0, -2.0], [True, True]), text([-3.0, -1.0], [True, True])]
    others = [text([-1.0, -2.2], [True, False]), text([-3.2, -1.0], [True, True])]
    found = agreement(theirs, others)
    assert (found["tokens"], found["same"]) == (4, 3)
    assert found["logprob_rms"] == pytest.approx(0.141421)
    assert found["logprob_max"] == pytest.approx(0.2)
    # Both texts have a mean square of .02, so that another text is likely to have it, too.
    assert found["logprob_rms_error"] == pytest.approx(0.0)
    others[1] = theirs[1]
    found = agreement(theirs, others)
    # Mean squares of .02 and 0: .01 +- .01, whose root is .1 +- .05.
    assert found["logprob_rms"] == pytest.approx(0.1)
    assert found["logprob_rms_error"] == pytest.approx(0.05)


def test_texts_of_other_tokens_are_refused() -> None:
    other = {**text([-1.0], [True]), "tokens": [7]}
    with pytest.raises(ValueError, match=r"tokens: got \[7\], expected \[0\]"):
        agreement([text([-1.0], [True])], [other])


@pytest.mark.parametrize(("batch", "limit"), [(1, 0.90), (8, 0.90), (32, 0.93), (128, 0.96)])
def test_steps_of_all_parts_have_limits(batch: int, limit: float) -> None:
    row = {"section": "step", "case": "a", "batch": batch, "parts": ALL, "ratio": limit}
    assert missed([row], ALL) == []
    slower = {**row, "ratio": limit + 0.01}
    (found,) = missed([slower], ALL)
    assert found.startswith(f"a: got a ratio of {limit + 0.01}, expected <= {limit}")
    assert missed([{**slower, "parts": "linears"}, {**slower, "ranks": 2}], ALL) == []


def test_attention_has_a_limit() -> None:
    row = {"section": "attention", "case": "a", "ratio": 0.96}
    assert len(missed([row, {"section": "attention", "case": "a"}], ALL)) == 1


def test_texts_may_differ_as_vllms_own() -> None:
    own = [texts_row(0.01), texts_row(0.02, differs="eager")]
    assert missed([*own, texts_row(0.02, parts=ALL)], ALL) == []
    assert missed([*own, texts_row(0.0228, parts=ALL)], ALL) == []
    (found,) = missed([*own, texts_row(0.0229, parts=ALL)], ALL)
    assert "got an error of 0.0229 in log probabilities, expected <= 0.02 +- 0.002828" in found
    uncertain = texts_row(0.0229, parts=ALL, logprob_rms_error=0.002)
    assert missed([*own, uncertain], ALL) == []
    assert missed([{**texts_row(0.03, parts=ALL), "case": "b"}, *own], ALL) == []
