"""The speed of a run, for people and for machines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.graphs import RunnerStats

    from ..engine import EngineStats


@dataclass(frozen=True)
class Phase:
    """Steps of one kind: how many, the tokens in them, and their latencies in milliseconds.

    The latencies and the rate are None when there were no steps.
    """

    steps: int
    tokens: int
    median_ms: float | None = None
    p99_ms: float | None = None
    tokens_per_s: float | None = None

    @staticmethod
    def of(seconds: Sequence[float], tokens: int) -> Phase:
        """Return the phase whose steps took `seconds` each."""
        from ..bench.timing import percentile

        if not seconds:
            return Phase(0, tokens)
        return Phase(
            steps=len(seconds),
            tokens=tokens,
            median_ms=statistics.median(seconds) * 1e3,
            p99_ms=percentile(seconds, 99) * 1e3,
            tokens_per_s=tokens / sum(seconds),
        )

    def __str__(self) -> str:
        if self.median_ms is None:
            return "no steps"
        return (
            f"{_count(self.tokens, 'token')} in {_count(self.steps, 'step')}, "
            f"{self.tokens_per_s:.0f} tokens/s; "
            f"per step: median {self.median_ms:.2f} ms, p99 {self.p99_ms:.2f} ms"
        )


@dataclass(frozen=True)
class Summary:
    """A whole run.

    Args:
        prefill: steps that computed prompts or parts of them; where a prompt ends, its text gets
            its first token.
        decode: steps that gave one token more to every text they served. Those that did both count
            in both.
        seconds: wall clock from the first prompt to the last token.
        tokens: generated.
        padding_rows: rows that replays of decode steps computed for nothing.
        padding_waste: the same as a fraction of all rows computed.
        preemptions: how often a text had to wait because KV pages had run out.
    """

    prefill: Phase
    decode: Phase
    seconds: float
    tokens: int
    padding_rows: int
    padding_waste: float
    preemptions: int

    @staticmethod
    def of(stats: EngineStats, runner: RunnerStats, *, seconds: float, tokens: int) -> Summary:
        """Return the summary of an engine that served `tokens` tokens in `seconds`."""
        return Summary(
            prefill=Phase.of(stats.prefill_seconds, stats.prefill_tokens),
            decode=Phase.of(stats.decode_seconds, stats.decode_tokens),
            seconds=seconds,
            tokens=tokens,
            padding_rows=runner.padded_rows,
            padding_waste=runner.padding_waste,
            preemptions=stats.preemptions,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the same in a form that JSON can hold."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"prefill   {self.prefill}",
            f"decode    {self.decode}",
            f"total     {_count(self.tokens, 'token')} generated in {self.seconds:.2f} s, "
            f"{self.tokens / self.seconds:.0f} tokens/s",
            f"padding   {_count(self.padding_rows, 'row')}, {self.padding_waste:.1%} of all rows",
        ]
        if self.preemptions:
            times = _count(self.preemptions, "time")
            lines.append(f"preempted {times}: more --num-pages would avoid it")
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
