"""Timing of calls, and percentiles of a sample of times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

MIN_REPEATS = 10


def time_calls(
    call: Callable[[], object], device: torch.device, *, repeats: int, warmup: int = 3
) -> list[float]:
    """Return the seconds of each of `repeats` back-to-back calls, after `warmup` untimed ones.

    On CUDA the time between events recorded on the current stream after each call, without a
    synchronisation in between: the host runs ahead as it does in a decode loop, and its time
    shows only where it is the bottleneck. On the CPU the wall clock.

    Raises:
        ValueError: for fewer than `MIN_REPEATS` repeats.
    """
    if repeats < MIN_REPEATS:
        raise ValueError(f"repeats: got {repeats}, expected at least {MIN_REPEATS}")
    for _ in range(warmup):
        call()
    return time_each(call, device, repeats)


def time_each(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` back-to-back calls, as `time_calls` measures them."""
    return _cuda(call, device, repeats) if device.type == "cuda" else _cpu(call, repeats)


def percentile(sample: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the sample do not exceed.

    Raises:
        ValueError: for an empty sample.
    """
    if not sample:
        raise ValueError("sample: got no values, expected at least one")
    rank = max(math.ceil(len(sample) * percent / 100), 1)
    return sorted(sample)[rank - 1]


def _cpu(call: Callable[[], object], repeats: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(repeats):
        call()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def _cuda(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        events[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
