"""What the graph manager raises beside ValueError and TypeError for bad arguments."""

from __future__ import annotations

from collections.abc import Mapping

from .failures import Diagnosis


class GraphError(RuntimeError):
    """Base of every error below."""


class NotCapturedError(GraphError):
    """A run came before a capture succeeded."""


class InvalidatedError(GraphError):
    """A run came after the captured graphs had been declared out of date."""


class ClosedError(GraphError):
    """The runner has been closed."""


class AsleepError(GraphError):
    """A run came while the runner's graphs are released; see `GraphRunner.sleep`."""


class BusyError(GraphError):
    """A runner or a stream was called while another of its operations was under way.

    Attributes:
        busy: the runner that refused; None where a stream was the reason.
    """

    def __init__(self, message: str, busy: object = None) -> None:
        """Take the message, and who is busy."""
        super().__init__(message)
        self.busy = busy


class BurstError(GraphError):
    """A step cannot be repeated on the device, or failed there."""


class ForkedError(GraphError):
    """A runner, or what works with one, was used in a fork of the process that made it."""


class CaptureError(GraphError):
    """The step failed while it was warmed up, captured or verified; the cause is chained.

    Attributes:
        diagnosis: what is known of the place and the reason, and what to do; the message has it.
    """

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        """Take the message, and the diagnosis that it ends with."""
        super().__init__(message)
        self.diagnosis = diagnosis


class RankError(GraphError):
    """A capture failed here because it failed in another process of the group.

    Attributes:
        failures: what each rank that failed has said, by its number; empty where it is not theirs,
            as with a store that is gone.
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        """Take the message, and what it was made of."""
        super().__init__(message)
        self.failures = dict(failures or {})


class AuditError(GraphError):
    """A strict audit refused a captured graph; the message says what it found."""


class VerificationError(GraphError):
    """A replay did not give what the step itself gives for the same inputs."""
