"""How results of attention are checked before they are timed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .results import CaseResult, CaseT

Call = Callable[[], torch.Tensor]

# Of what is checked of a sequence, the norm of its error relative to its own. Rounding weights and
# results to bf16 makes some 0.003 of it.
MOST_ERROR = 0.01


def checked_calls(
    name: str,
    bind: Callable[[], list[Call]],
    out: torch.Tensor,
    difference: Callable[[torch.Tensor], str | None],
    result: CaseResult[CaseT],
    *,
    is_ours: bool,
    refusals: tuple[type[Exception], ...] = (RuntimeError, ValueError),
) -> list[Call]:
    """Return an implementation's calls, none where it refuses the case or the first one is wrong.

    Args:
        name: of the implementation.
        bind: makes the calls.
        out: where the first one writes.
        difference: says what is wrong with a result.
        result: of the case, in which a refusal or wrong result is noted.
        is_ours: whether a refusal is a failure.
        refusals: errors by which an implementation refuses a case.
    """
    # What is not written must not pass for a result of the implementation before.
    out.fill_(torch.nan)
    try:
        calls = bind()
        got = calls[0]()
    except refusals as error:
        result.refuse(name, error, is_ours=is_ours)
        return []
    wrong = difference(got)
    if wrong is not None:
        result.failures[name] = f"wrong result: {wrong}"
        return []
    return calls


def sequence_difference(
    sequence: int, got: torch.Tensor, right: torch.Tensor, most: float = MOST_ERROR
) -> str | None:
    """Return what is wrong with results of a sequence, None when they are close to `right`."""
    error = got.float() - right
    relative = (error.norm() / right.norm()).item()
    if not relative <= most:  # True for NaN
        return f"sequence {sequence} is off by {relative:.2g}, expected {most:g} at most"
    return None
