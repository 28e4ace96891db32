"""What a backend makes of a step: a graph, and what replays, times and repeats it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .outputs import Outputs


class ReplayTimer(Protocol):
    """Times replays without waiting for them."""

    def replay(self, graph: Graph) -> bool:
        """Replay; return whether the replay is timed."""

    def finished(self) -> list[float]:
        """Return the microseconds of timed replays that have ended since the last call.

        Another thread may be in `replay`, but not in here.
        """


@dataclass(frozen=True)
class MemoryUse:
    """Device memory in bytes: reserved by the graphs' pool, and free according to the driver."""

    pool_bytes: int
    free_bytes: int


class BurstLoop(Protocol):
    """Repeats one captured step, each time on what the last one left in its buffers."""

    def launch(self) -> None:
        """Begin on the caller's stream, where `BurstMemory.start` has been called."""

    def wait(self, step: int) -> None:
        """Return when the tokens of `step` are in the memory, or the burst has ended.

        Raises:
            BurstError: when the device failed before that.
        """

    def abandon(self) -> None:
        """Wait for the end of what `launch` may have begun, after the burst was cancelled."""

    def release(self) -> None:
        """Give back what the driver holds for the loop. No burst may be running."""


class Graph(Protocol):
    """A step captured for one batch size.

    Attributes:
        loop: what repeats it, once that was made; released with the graph.
    """

    loop: BurstLoop | None

    @property
    def outputs(self) -> Outputs:
        """Where every replay writes; on CUDA without a hold on the pool's memory."""

    @property
    def executable(self) -> int | None:
        """What the driver launches, 0 where `replay` must be called.

        None where that is not known yet, or a replay takes more than either.
        """

    @property
    def instantiate_ms(self) -> float | None:
        """What making an executable of the recording took; None where there is none to make."""

    def replay(self) -> None:
        """Run the step on what its buffers hold now, on the current stream."""

    def release(self) -> None:
        """Give back what the driver holds for the graph."""
