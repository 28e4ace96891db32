"""What a benchmark says of one case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .report import Row

CaseT = TypeVar("CaseT")


@dataclass
class CaseResult(Generic[CaseT]):
    """A case: its rows, and for implementations that have none the reason.

    A peer may have refused a case (`unsupported`); a wrong result, and a refusal of ours, is a
    failure.
    """

    case: CaseT
    rows: list[Row] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def refuse(self, impl: str, error: Exception, *, is_ours: bool) -> None:
        """Note why an implementation took no time: the first line of its error."""
        reasons = self.failures if is_ours else self.unsupported
        reasons[impl] = (str(error).splitlines() or [type(error).__name__])[0]
