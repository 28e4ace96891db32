"""Where the time of a step goes, kernel by kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

_REPLAYS = 5
_NAMESPACES = re.compile(r"\(anonymous namespace\)::|\bvoid |\bostinato::")


@dataclass
class KernelShare:
    """What all launches of a kernel take of one step.

    With programmatic launches kernels overlap, and one runs while it waits for another: the times
    that they run sum up to more than the step. What each adds, from the end of the kernel that
    ended before it to its own, sums up to the step.

    Args:
        name: without its arguments.
        launches: of a step.
        added_us: microseconds that the step would seem to gain without it.
        running_us: microseconds from the beginnings to the ends of its launches.
    """

    name: str
    launches: float = 0.0
    added_us: float = 0.0
    running_us: float = 0.0


def kernel_shares(step: Callable[[], object]) -> list[KernelShare]:
    """Return what each kernel and copy adds to a step on CUDA, the largest first.

    The profiler slows the step down a little; what it says is about proportions.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_REPLAYS):
            step()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]
    shares = shares_of(spans)
    for share in shares:
        share.launches /= _REPLAYS
        share.added_us /= _REPLAYS
        share.running_us /= _REPLAYS
    return shares


def shares_of(spans: Iterable[tuple[float, float, str]]) -> list[KernelShare]:
    """Return the shares of launches (beginning, end, name), in microseconds, the largest first."""
    shares: dict[str, KernelShare] = {}
    last: float | None = None
    for begin, end, name in sorted(spans, key=lambda span: span[1]):
        name = _NAMESPACES.sub("", name).partition("(")[0].partition("<")[0]
        share = shares.setdefault(name, KernelShare(name))
        share.launches += 1
        share.added_us += max(0.0, end - (begin if last is None else last))
        share.running_us += end - begin
        last = end
    return sorted(shares.values(), key=lambda share: -share.added_us)
