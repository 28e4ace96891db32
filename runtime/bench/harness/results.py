"""The results of one case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..report import Row

CaseT = TypeVar("CaseT")


@dataclass
class CaseResult(Generic[CaseT]):
    """A case: its rows, and for implementations without a row the reason.

    Args:
        case: what was computed.
        rows: one for each implementation that was timed.
        unsupported: why a peer does not take the case, by the peer's name.
        failures: what went wrong, by name: a wrong result, or a case that ours does not take.
    """

    case: CaseT
    rows: list[Row] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def refuse(self, impl: str, reason: str, *, is_ours: bool) -> None:
        """Note why an implementation is not timed; of several lines, the first is kept."""
        reasons = self.failures if is_ours else self.unsupported
        reasons[impl] = reason.splitlines()[0]
