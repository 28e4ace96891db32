"""The check of a result before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

CaseT = TypeVar("CaseT")
SetT = TypeVar("SetT")

# The norm of a row sample's error relative to the norm of the sample. Rounding attention's weights
# and results to bf16 makes about 0.003 of it.
MAX_ERROR = 0.01


@dataclass(frozen=True)
class Check(Generic[CaseT, SetT]):
    """A comparison with a reference of higher precision.

    Args:
        reference: returns the reference for one set of inputs; computed once for all
            implementations that read the set.
        difference: returns the text of what is wrong with a result, or None. Its arguments are the
            result, the reference, the set of inputs and the implementation's layout.
    """

    reference: Callable[[CaseT, SetT], Any]
    difference: Callable[[torch.Tensor, Any, SetT, Any], str | None]

    def wrong(
        self, got: torch.Tensor, case: CaseT, inputs: SetT, layout: Hashable = None
    ) -> str | None:
        """Return what is wrong with a result, None when it is close to the reference."""
        return self.difference(got, self.reference(case, inputs), inputs, layout)


@dataclass(frozen=True)
class Sample:
    """Some rows of a result, and the reference for them.

    Args:
        name: as a message calls the rows, such as "sequence 0".
        rows: indices into the first dimension of the result, int64.
        right: [rows, ...] fp32.
    """

    name: str
    rows: torch.Tensor
    right: torch.Tensor


def sample_check(
    samples: Callable[[CaseT, SetT], Sequence[Sample]],
    shape: Callable[[SetT], torch.Size],
    max_error: Callable[[SetT], float] = lambda inputs: MAX_ERROR,
) -> Check[CaseT, SetT]:
    """Return a check that compares samples of rows by the norm of their error.

    Args:
        samples: returns the rows to compare.
        shape: returns the shape of a result; one with as many elements is taken, too.
        max_error: returns the largest norm of the error, relative to that of the reference.
    """

    def difference(
        got: torch.Tensor, reference: Sequence[Sample], inputs: SetT, layout: object
    ) -> str | None:
        expected = shape(inputs)
        if got.numel() != expected.numel():
            return f"got shape {list(got.shape)}, expected {list(expected)}"
        rows = got.reshape(expected)
        most = max_error(inputs)
        for sample in reference:
            error = rows[sample.rows].float() - sample.right
            relative = (error.norm() / sample.right.norm()).item()
            if not relative <= most:  # True for NaN
                return f"{sample.name} is off by {relative:.2g}, expected {most:g} at most"
        return None

    return Check(samples, difference)
