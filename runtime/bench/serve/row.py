"""What a load showed, as a row of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..plot import Dot
from ..timing import percentile
from .client import Stream

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good, in milliseconds; None for no limit.

    Args:
        first: to its first token.
        between: between its tokens, on average.
        whole: to its end.
    """

    first: float | None = None
    between: float | None = None
    whole: float | None = None

    def keeps(self, stream: Stream) -> bool:
        """Return whether a request kept them."""
        first, mean, whole = _milliseconds(stream)
        return all(
            limit is None or value <= limit
            for value, limit in ((first, self.first), (mean, self.between), (whole, self.whole))
        )


@dataclass(frozen=True)
class ServeRow:
    """A load on a server.

    Args:
        section: "serve".
        case: the load in words.
        impl: the server.
        requests: that were sent.
        failed: of these.
        seconds: from the first request to the last end.
        output_tokens_s: generated tokens per second.
        first_ms: p50, p90 and p99 of the times to the first token.
        between_ms: of the times between two events of a stream.
        whole_ms: of the times to the end.
        good_s: requests per second that kept the limits.
    """

    section: str
    case: str
    impl: str
    requests: int
    failed: int
    seconds: float
    output_tokens_s: float
    first_ms: tuple[float, ...]
    between_ms: tuple[float, ...]
    whole_ms: tuple[float, ...]
    good_s: float

    @staticmethod
    def of(
        case: str, impl: str, streams: Sequence[Stream], seconds: float, limits: Limits
    ) -> ServeRow:
        """Return the row of what requests saw.

        Raises:
            ValueError: when all of them have failed, with the first error.
        """
        well = [stream for stream in streams if stream.error is None and stream.times]
        if not well:
            raise ValueError(f"all {len(streams)} requests have failed: {streams[0].error}")
        gaps = [1e3 * (b - a) for stream in well for a, b in pairwise(stream.times)]
        times = [_milliseconds(stream) for stream in well]
        return ServeRow(
            section="serve",
            case=case,
            impl=impl,
            requests=len(streams),
            failed=len(streams) - len(well),
            seconds=round(seconds, 3),
            output_tokens_s=round(sum(stream.tokens for stream in well) / seconds, 2),
            first_ms=_percentiles([first for first, _, _ in times]),
            between_ms=_percentiles(gaps),
            whole_ms=_percentiles([whole for _, _, whole in times]),
            good_s=round(sum(map(limits.keeps, well)) / seconds, 3),
        )

    def dots(self) -> list[Dot]:
        """Return the values for a picture."""
        dots = [Dot("output tokens/s", self.case, self.impl, self.output_tokens_s)]
        panels = {
            "first token, ms": self.first_ms,
            "between tokens, ms": self.between_ms,
            "whole request, ms": self.whole_ms,
        }
        for panel, values in panels.items():
            dots += [
                Dot(f"{panel} (p50, p90, p99)", self.case, self.impl, value)
                for value in values
                if value > 0
            ]
        return dots


def _milliseconds(stream: Stream) -> tuple[float, float, float]:
    """Return the time to the first token, the mean between tokens, and the time to the end."""
    first, last = stream.times[0], stream.times[-1]
    between = (last - first) / max(1, stream.tokens - 1)
    return 1e3 * (first - stream.sent), 1e3 * between, 1e3 * (last - stream.sent)


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """Return the percentiles; zeros of no values, as texts of one token have."""
    return tuple(round(percentile(values or [0.0], share), 3) for share in _PERCENTILES)
