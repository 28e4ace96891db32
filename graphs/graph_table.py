"""The captured graphs of a runner: which one serves a run, how often, and which is let go of."""

from __future__ import annotations

from bisect import bisect_left

from ._native import RunCounts
from .buckets import smallest_bucket
from .capture_plan import CapturePlan
from .graph import Graph
from .graph_key import DEFAULT, Key, Variant
from .metrics.stats import BucketStats


class Bucket:
    """One key: its graph, if there is one now, and how it was used since the last capture."""

    __slots__ = ("captures", "counts", "graph", "key")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.graph: Graph | None = None
        self.captures = 0
        self.counts = RunCounts()

    def stats(self) -> BucketStats:
        """Return what was counted."""
        hits, eager, rows = self.counts.read()
        size, variant = self.key
        return BucketStats(size, hits, rows, variant.q_len, variant.name, eager, self.captures)


# Batch sizes, increasing, and their buckets.
_Row = tuple[tuple[int, ...], list[Bucket]]


class GraphTable:
    """All buckets of a plan; empty of graphs until `put`.

    Args:
        plan: what is captured, and what runs may ask for beside it.

    Attributes:
        limit: how many graphs there may be; None for any number.
    """

    def __init__(self, plan: CapturePlan) -> None:
        self.plan = plan
        self.buckets = {key: Bucket(key) for key in plan.warmed}
        self.evictions = 0
        misses = plan.misses
        self.limit = None if misses is None else misses.max_graphs
        self._captures_misses = misses is not None and misses.action == "capture"
        self._captured: dict[Variant, tuple[int, ...]] = {}
        self._hits: dict[Variant, _Row] = {}  # what a run looks at first
        self._list()
        self._recent: dict[Key, None] = {}  # in the order of their last runs

    @property
    def max_batch_size(self) -> int:
        """The largest batch of the default variant, or else of the first."""
        served = self.plan.served
        return served.get(DEFAULT, next(iter(served.values())))[-1]

    def captured(self, variant: Variant) -> tuple[int, ...]:
        """Return the batch sizes of which there are graphs, increasing."""
        return self._captured.get(variant, ())

    def keys(self) -> tuple[Key, ...]:
        """Return what there are graphs of."""
        return tuple(key for key, bucket in self.buckets.items() if bucket.graph is not None)

    def put(self, key: Key, graph: Graph) -> None:
        """Add a graph."""
        # In this order: what Ctrl-C leaves out of it is only found later, or not at all.
        self._recent[key] = None
        self.buckets[key].graph = graph
        self._list()

    def find(self, n: int, variant: Variant) -> Bucket:
        """Return the bucket that serves `n` rows, with its graph or, for a miss, without.

        Raises:
            ValueError: when `n` is too large or too small, or the variant is none of the plan.
            TypeError: when the variant is something that cannot be hashed.
        """
        try:
            hits = self._hits.get(variant)
        except TypeError as error:
            raise TypeError(f"variant: got {variant!r}, expected a Variant") from error
        sizes, buckets = hits or self._row(variant)
        if not sizes or n > sizes[-1]:
            sizes, buckets = self._row(variant)
        if not 1 <= n <= sizes[-1]:
            smallest_bucket(n, sizes)  # refuses it
        return buckets[bisect_left(sizes, n)]

    def use(self, key: Key) -> None:
        """Note that a graph is about to be run; needed where `limit` is not None."""
        self._recent.pop(key, None)
        self._recent[key] = None

    def take_surplus(self) -> list[Graph]:
        """Take out the graphs that were run longest ago, as many as there are too many."""
        taken: list[Graph] = []
        while self.limit is not None and len(self._recent) > self.limit:
            key = next(iter(self._recent))
            bucket = self.buckets[key]
            if bucket.graph is not None:
                taken.append(bucket.graph)
            bucket.graph = None
            del self._recent[key]
            self.evictions += 1
        if taken:
            self._list()
        return taken

    def take_all(self) -> list[Graph]:
        """Take out all graphs."""
        taken = [bucket.graph for bucket in self.buckets.values() if bucket.graph is not None]
        for bucket in self.buckets.values():
            bucket.graph = None
        self._recent.clear()
        self._list()
        return taken

    def _row(self, variant: Variant) -> _Row:
        """Return all that runs of a variant may have."""
        served = self.plan.served.get(variant)
        if served is None:
            known = [str(variant) for variant in self.plan.served]
            raise ValueError(f"variant: got {variant!s}, expected one of {known}")
        return served, [self.buckets[Key(size, variant)] for size in served]

    def _list(self) -> None:
        self._captured = {
            variant: tuple(
                size for size in sizes if self.buckets[Key(size, variant)].graph is not None
            )
            for variant, sizes in self.plan.served.items()
        }
        # A run that is to be captured if it is missed takes the smallest batch size of all.
        sizes = self.plan.served if self._captures_misses else self._captured
        self._hits = {
            variant: (row, [self.buckets[Key(size, variant)] for size in row])
            for variant, row in sizes.items()
        }
