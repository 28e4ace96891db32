"""The time of a decode step of a server, as its clients see it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..plot import Dot
from .client import Server
from .load import Lengths, Load, send_all


@dataclass(frozen=True)
class StepRow:
    """Decode steps of a batch that arrives at once, as `bench engine` times those of an engine.

    Args:
        section: "step".
        case: the batch in words, as in rows of `bench engine`.
        impl: the server.
        us: (median seconds of the long text - median seconds of the short one) per token between.
        short_s, long_s: seconds of each short and each long text, in the order of their runs.
    """

    section: str
    case: str
    impl: str
    us: float
    short_s: tuple[float, ...]
    long_s: tuple[float, ...]

    @staticmethod
    def of(
        case: str, impl: str, outputs: tuple[int, int], runs: list[tuple[float, float]]
    ) -> StepRow:
        """Return the row of the seconds that pairs of texts took.

        Raises:
            ValueError: when the longer ones took no longer.
        """
        short, long = (tuple(round(s, 5) for s in each) for each in zip(*runs, strict=True))
        seconds = statistics.median(long) - statistics.median(short)
        if seconds <= 0:
            raise ValueError(
                f"output: texts of {outputs[0]} and {outputs[1]} tokens took {short} and {long} s, "
                "expected the longer to take longer: measure with longer ones, or more repeats"
            )
        us = round(seconds / (outputs[1] - outputs[0]) * 1e6, 2)
        return StepRow("step", case, impl, us, short, long)

    def dots(self) -> list[Dot]:
        """Return the time as a picture of rows shows it."""
        return [Dot("step, µs", self.case, self.impl, self.us)]


async def time_steps(
    server: Server,
    load: Load,
    outputs: tuple[int, int],
    repeats: int,
    on_end: Callable[[], None] = lambda: None,
) -> list[tuple[float, float]]:
    """Return the seconds of batches of short and of long texts, in turn.

    Args:
        server: gets them.
        load: its concurrency is the batch; the lengths of its prompts are sent again each time,
            with other tokens: none may be in the server's cache already.
        outputs: tokens of the short and of the long texts.
        repeats: batches of each kind, behind an untimed one.
        on_end: called when a request ends.

    Raises:
        ValueError: when a request fails, with its error, or its text has another length.
    """
    seeds = iter(range(load.seed, load.seed + 2 * repeats + 1))

    async def seconds(output: int) -> float:
        lengths = [Lengths(each.prompt, output) for each in load.lengths]
        batch = replace(load, lengths=lengths, seed=next(seeds))
        streams, took = await send_all(server, batch, on_end=on_end)
        for stream in streams:
            if stream.error is not None or stream.tokens != output:
                got = stream.error or f"{stream.tokens} tokens"
                raise ValueError(f"a request of {output} tokens has failed: {got}")
        return took

    await seconds(outputs[0])
    return [(await seconds(outputs[0]), await seconds(outputs[1])) for _ in range(repeats)]
