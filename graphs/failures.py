"""What is known of a failed capture; `inspect/diagnosis.py` finds it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 4  # of each kind, in a message


@dataclass(frozen=True)
class Line:
    """A line of source.

    Attributes:
        file, number, function: where it is.
        text: the line itself; empty where the file is not at hand.
    """

    file: str
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        """Return the place as compilers write it, and the line."""
        text = f": {self.text}" if self.text else ""
        return f"{self.file}:{self.number} in {self.function}{text}"


@dataclass(frozen=True)
class Call:
    """One call of an operator of torch, such as `aten.mul.Tensor`, and the user's line."""

    operator: str
    line: Line | None

    def __str__(self) -> str:
        """Return both."""
        return self.operator if self.line is None else f"{self.operator} at {self.line}"


@dataclass(frozen=True)
class Trace:
    """What a second capture of the step showed, watched operator by operator.

    Attributes:
        failed: the operator in which the capture failed; None if it did not fail in one.
        between: the operators before and after a call that is not torch's in which it failed; None
            on a side where there is no operator.
        outside: operators that ran on a stream which is not captured.
        error: why the step could not be called to its end; None if it was.
    """

    failed: Call | None = None
    between: tuple[Call | None, Call | None] | None = None
    outside: Sequence[Call] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What is known about a failure; what is not is None or empty.

    Attributes:
        line: the user's line, outside of torch and of this package.
        operator: torch's operator that failed.
        place: what is known of the place where there is no line.
        outside: operators that ran on a stream which is not captured.
        reasons: what the driver logged meanwhile.
        remedy: what to do, where the failure is of a known kind.
    """

    line: Line | None = None
    operator: str | None = None
    place: str | None = None
    outside: tuple[Call, ...] = ()
    reasons: tuple[str, ...] = ()
    remedy: str | None = None

    def __str__(self) -> str:
        """Return a line for each thing known."""
        parts = {
            "at": self.line,
            "operator": self.operator,
            "place": self.place,
            "not captured": "; ".join(map(str, self.outside[:_SHOWN])),
            "driver": "; ".join(self.reasons[:_SHOWN]),
            "remedy": self.remedy,
        }
        return "\n".join(f"  {name}: {value}" for name, value in parts.items() if value)


@dataclass(frozen=True)
class Failure:
    """What a backend knows of a failed capture.

    Attributes:
        reasons: what the driver logged while the step ran.
        trace: what a second capture showed; None where there was none.
    """

    reasons: Sequence[str] = ()
    trace: Trace | None = None
