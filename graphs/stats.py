"""How the buckets of a runner were used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketStats:
    """One bucket since the last capture.

    Attributes:
        batch_size: rows that every replay computes.
        hits: runs that it served.
        rows: real rows in them.
    """

    batch_size: int
    hits: int
    rows: int

    @property
    def padded_rows(self) -> int:
        """Rows computed as padding."""
        return self.hits * self.batch_size - self.rows

    @property
    def padding_waste(self) -> float:
        """Padded rows as a fraction of all rows computed; 0 when there were none."""
        return _fraction(self.padded_rows, self.hits * self.batch_size)


@dataclass(frozen=True)
class RunnerStats:
    """All buckets since the last capture, by increasing batch size."""

    buckets: tuple[BucketStats, ...]

    @property
    def hits(self) -> int:
        """Runs."""
        return sum(bucket.hits for bucket in self.buckets)

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


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
