"""Rows of results of vLLM with the plug-in beside vLLM alone, and their limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Text = Mapping[str, Any]  # tokens, their log probabilities, and whether each is the likeliest

# Our time over vLLM's that all parts of the plug-in together may take, by batch.
STEP_LIMITS = {1: 0.90, 8: 0.90, 32: 0.93, 128: 0.96}
ATTENTION_LIMIT = 0.95


def milliseconds(answers: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Return the median time of a step, of answers with the `seconds` of so many."""
    return statistics.median(answer["seconds"] for answer in answers) / steps * 1e3


def beside(row: Mapping[str, Any], peer: str, us: float) -> dict[str, Any]:
    """Return a row of ours with the peer's name and our time over its time."""
    return {**row, "peer": peer, "ratio": round(row["us"] / us, 4)}


def agreement(theirs: Sequence[Text], others: Sequence[Text]) -> dict[str, Any]:
    """Compare texts that go on with the same tokens, and return what a row says of them.

    Args:
        theirs: of vLLM alone, which has chosen the tokens.
        others: of the same tokens, as likely as another engine has them.

    Returns:
        How many `tokens` there are, for how many the `same` was the likeliest in both, and of the
        differences of their log probabilities the root of the mean square, its standard error
        from text to text, and the largest.

    Raises:
        ValueError: for texts of other tokens.
    """
    apart: list[float] = []
    squares, same = [], 0
    for text, other in zip(theirs, others, strict=True):
        if text["tokens"] != other["tokens"]:
            raise ValueError(f"tokens: got {other['tokens']}, expected {text['tokens']}")
        differences = [x - y for x, y in zip(text["logprobs"], other["logprobs"], strict=True)]
        apart += differences
        squares.append(statistics.fmean(x * x for x in differences))
        same += sum(x == y for x, y in zip(text["best"], other["best"], strict=True))
    rms = math.sqrt(statistics.fmean(x * x for x in apart))
    of_squares = statistics.stdev(squares) / math.sqrt(len(squares)) if len(squares) > 1 else 0.0
    return {
        "tokens": len(apart),
        "same": same,
        "logprob_rms": round(rms, 6),
        "logprob_rms_error": round(of_squares / (2 * rms) if rms else 0.0, 6),
        "logprob_max": round(max(map(abs, apart)), 6),
    }


def missed(rows: Sequence[Mapping[str, Any]], all_parts: str) -> list[str]:
    """Return a sentence for each row of all parts of the plug-in that is above its limit.

    Log probabilities may differ from vLLM's as much as vLLM's differ from its own, whichever of
    its ways differs most: a difference of two standard errors counts.
    """
    found = []
    for row in rows:
        limit = None
        whole = row.get("parts") == all_parts and "ranks" not in row
        if row["section"] == "step" and whole and "ratio" in row:
            limit = STEP_LIMITS.get(row.get("batch", 0))
        elif row["section"] == "attention" and "ratio" in row:
            limit = ATTENTION_LIMIT
        if limit is not None and row["ratio"] > limit:
            found.append(f"{row['case']}: got a ratio of {row['ratio']}, expected <= {limit}")
        if row["section"] == "texts" and "parts" in row:
            own = [
                other
                for other in rows
                if other["section"] == "texts"
                and other["case"] == row["case"]
                and "parts" not in other
            ]
            noise = max(own, key=lambda other: other["logprob_rms"], default=row)
            error = math.hypot(row["logprob_rms_error"], noise["logprob_rms_error"])
            if row["logprob_rms"] > noise["logprob_rms"] + 2 * error:
                found.append(
                    f"{row['case']}, {row['parts']}: got an error of {row['logprob_rms']} in log "
                    f"probabilities, expected <= {noise['logprob_rms']} +- {2 * error:.6f}, as "
                    "vLLM has beside itself"
                )
    return found
