"""How the graphs of a runner were used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .histogram import Histogram
from .prometheus import Metric, to_text


@dataclass(frozen=True)
class BucketStats:
    """One batch size of one variant since the last capture.

    Attributes:
        batch_size: rows that every run computes.
        hits: runs that a replay served.
        rows: real rows in all runs.
        q_len, variant: of the variant.
        eager: runs for which there was no graph, so that the step was called.
        captures: how often a run captured it.
    """

    batch_size: int
    hits: int
    rows: int
    q_len: int = 1
    variant: str = ""
    eager: int = 0
    captures: int = 0

    @property
    def padded_rows(self) -> int:
        """Rows computed as padding."""
        return self._computed - self.rows

    @property
    def padding_waste(self) -> float:
        """Padded rows as a fraction of all rows computed; 0 when there were none."""
        return _fraction(self.padded_rows, self._computed)

    @property
    def _computed(self) -> int:
        return (self.hits + self.eager) * self.batch_size


@dataclass(frozen=True)
class RunnerStats:
    """All buckets since the last capture, by variant and increasing batch size.

    Attributes:
        buckets: one for each batch size that runs may have.
        evictions: graphs that were released for another, where their number is limited.
        replay_us: how long replays took on the device, of those that were timed; None unless
            `GraphRunner.observe` asks for it.
    """

    buckets: tuple[BucketStats, ...]
    evictions: int = 0
    replay_us: Histogram | None = None

    @property
    def hits(self) -> int:
        """Runs that a replay served."""
        return sum(bucket.hits for bucket in self.buckets)

    @property
    def eager_falls(self) -> int:
        """Runs for which there was no graph, so that the step was called."""
        return sum(bucket.eager for bucket in self.buckets)

    @property
    def lazy_captures(self) -> int:
        """Graphs that runs captured."""
        return sum(bucket.captures for bucket in self.buckets)

    @property
    def rows(self) -> int:
        """Real rows."""
        return sum(bucket.rows for bucket in self.buckets)

    @property
    def padded_rows(self) -> int:
        """Rows computed as padding."""
        return sum(bucket.padded_rows for bucket in self.buckets)

    @property
    def padding_waste(self) -> float:
        """Padded rows as a fraction of all rows computed; 0 when there were none."""
        return _fraction(self.padded_rows, self.rows + self.padded_rows)

    def to_prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Return the same in Prometheus' text format, every line with `labels`.

        Counters begin anew with each capture, which Prometheus takes for a restart.

        Raises:
            TypeError: when the labels are not a mapping of strings to strings.
            ValueError: for a label whose name Prometheus does not allow, or that is used here.
        """
        runs = Metric("ostinato_graph_runs_total", "counter", "Runs, by what served them.")
        rows = Metric("ostinato_graph_rows_total", "counter", "Rows computed.")
        captures = Metric(
            "ostinato_graph_lazy_captures_total", "counter", "Graphs captured inside of runs."
        )
        evictions = Metric(
            "ostinato_graph_evictions_total", "counter", "Graphs released for another."
        )
        for bucket in self.buckets:
            key = {
                "batch_size": str(bucket.batch_size),
                "q_len": str(bucket.q_len),
                "variant": bucket.variant,
            }
            runs.add(bucket.hits, key | {"served": "replay"})
            runs.add(bucket.eager, key | {"served": "eager"})
            rows.add(bucket.rows, key | {"kind": "real"})
            rows.add(bucket.padded_rows, key | {"kind": "padding"})
            captures.add(bucket.captures, key)
        evictions.add(self.evictions, {})
        metrics = [runs, rows, captures, evictions]
        if self.replay_us is not None:
            seconds = Metric("ostinato_graph_replay_seconds", "histogram", "Time of replays.")
            seconds.add_histogram(self.replay_us, scale=1e-6)
            metrics.append(seconds)
        return to_text(metrics, labels or {})


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
