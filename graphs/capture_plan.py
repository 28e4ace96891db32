"""The plan of a capture: which graphs are made at once, and what a run does for which none is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .arguments import as_list, at_least_one
from .buckets import check_batch_sizes, default_batch_sizes
from .graph_key import DEFAULT, Key, Variant, as_variant

# For each variant its batch sizes, None for the default ones; or those of the default variant.
BatchSizes = Iterable[int] | Mapping[Variant, Iterable[int] | None] | None

Action = Literal["eager", "capture"]
_ACTIONS: tuple[Action, ...] = ("eager", "capture")


@dataclass(frozen=True)
class Misses:
    """The action of a run for which no graph was captured; without it such a run is refused.

    Args:
        action: "eager" calls the step itself, where no graph holds the rows; "capture" captures
            the smallest of the batch sizes that holds them, inside `run`, which takes milliseconds
            and waits for the device.
        batch_sizes: that may be run or captured so, as for `GraphRunner.capture`; by default the
            default ones of every variant that is captured. All of them are warmed up by `capture`.
        max_graphs: with "capture", how many graphs there may be, those of `capture` included: the
            one that was run longest ago is released for another. By default any number.
        verify: with "capture", verify graphs that a run captures, too. Their examples are then
            written where they say in the midst of serving.

    Raises:
        TypeError, ValueError: when an argument is of the wrong kind.
    """

    action: Action
    batch_sizes: BatchSizes = None
    max_graphs: int | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.action not in _ACTIONS:
            raise ValueError(f"action: got {self.action!r}, expected one of {list(_ACTIONS)}")
        if self.max_graphs is None:
            return
        if self.action != "capture":
            raise ValueError("max_graphs: expected None where no run captures")
        at_least_one("max_graphs", self.max_graphs)


@dataclass(frozen=True)
class CapturePlan:
    """A plan that has been checked.

    Attributes:
        captured: the batch sizes to capture, of each variant.
        served: those that a run may have: `captured`, and what misses allow.
        misses: what a run does that is not served by a graph; None refuses it.
    """

    captured: Mapping[Variant, tuple[int, ...]]
    served: Mapping[Variant, tuple[int, ...]]
    misses: Misses | None

    @staticmethod
    def of(batch_sizes: BatchSizes, misses: Misses | None, max_batch: int) -> CapturePlan:
        """Check what the caller of `capture` asks for.

        Raises:
            TypeError, ValueError: for what is not possible; bad batch sizes with the corrected
                list.
        """
        captured = _by_variant(batch_sizes, max_batch, may_be_empty=misses is not None)
        if misses is None:
            return CapturePlan(captured, captured, None)
        if not isinstance(misses, Misses):
            raise TypeError(f"misses: got {type(misses).__name__}, expected Misses or None")
        if misses.batch_sizes is None:
            allowed = dict.fromkeys(captured, default_batch_sizes(max_batch))
        else:
            allowed = _by_variant(misses.batch_sizes, max_batch, may_be_empty=False)
        served = {
            variant: tuple(sorted({*captured.get(variant, ()), *allowed.get(variant, ())}))
            for variant in {**captured, **allowed}
        }
        for variant, sizes in served.items():
            if not sizes:
                raise ValueError(f"batch_sizes: got none for the variant {variant}")
        plan = CapturePlan(captured, served, misses)
        if misses.max_graphs is not None and len(plan.keys) > misses.max_graphs:
            raise ValueError(
                f"max_graphs: got {misses.max_graphs}, expected at least the {len(plan.keys)} "
                "graphs of this capture"
            )
        return plan

    @property
    def keys(self) -> tuple[Key, ...]:
        """What to capture, in the order of a report."""
        return _keys(self.captured)

    @property
    def warmed(self) -> tuple[Key, ...]:
        """What to warm up: also what only misses may run, so that no workspace grows later."""
        return _keys(self.served)


def _keys(sizes: Mapping[Variant, tuple[int, ...]]) -> tuple[Key, ...]:
    return tuple(Key(size, variant) for variant in sizes for size in sizes[variant])


def _by_variant(
    batch_sizes: BatchSizes, max_batch: int, *, may_be_empty: bool
) -> dict[Variant, tuple[int, ...]]:
    given = batch_sizes if isinstance(batch_sizes, Mapping) else {DEFAULT: batch_sizes}
    if not given:
        raise ValueError("batch_sizes: got no variant, expected at least one")
    checked = {}
    for key, sizes in given.items():
        variant = as_variant("batch_sizes", key)
        if sizes is None:
            checked[variant] = default_batch_sizes(max_batch)
        elif may_be_empty and not (sizes := as_list("batch_sizes", sizes)):
            checked[variant] = ()
        else:
            checked[variant] = check_batch_sizes(sizes, max_batch)
    return checked
