"""Timing of short kernels: many launches in one CUDA graph, with inputs that are not in the L2."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..timing import time_each

Call = Callable[[], object]

REPLAYS = 15  # per median
MIN_REPLAY_S = 2e-3  # so that starting a graph does not show
_MARGIN = 1.1  # few launches take longer for their share of the start
_ROUNDS = 5  # in which implementations take turns
_L2_MULTIPLE = 4.1
_MIN_L2 = 60_000_000  # bytes, where the driver reports a part only
_MAX_SETS = 1024


def num_sets(set_bytes: int, device: torch.device) -> int:
    """Return how many sets of inputs exceed the L2 four times, so that each use finds it cold.

    Args:
        set_bytes: bytes of one set that are worth caching.
        device: where they lie; on the CPU, which is not measured for its speed, two sets do.
    """
    if device.type != "cuda":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(math.ceil(_L2_MULTIPLE * max(l2, _MIN_L2) / set_bytes), 1), _MAX_SETS)


@dataclass(frozen=True)
class Pace:
    """The state of the device before each turn's timed replays.

    Args:
        rest_s: the device does nothing.
        run_in_s: the least time of replays that are not timed.
    """

    rest_s: float
    run_in_s: float


# The clock follows the power that the kernels of the last 100 ms took: an H200 runs a product at
# half speed for 10 ms after another one, then settles in 100 (docs/notebooks/gemm_tiled.md, "Large
# M"). So what is timed begins on a card at rest, as it does where each implementation is timed on
# its own, or when the clock has settled to what the power limit leaves.
RESTED = Pace(rest_s=30e-3, run_in_s=6e-3)
SUSTAINED = Pace(rest_s=0.0, run_in_s=160e-3)


@dataclass(frozen=True)
class Rotation:
    """Launches that rotate over input sets, ready to be replayed.

    Args:
        replay: launches them all.
        launches: how many they are.
        seconds: about how long they take, 0 where that was not measured.
        calls: what was captured: kept, for the launches use memory that the calls may hold.
    """

    replay: Call
    launches: int
    seconds: float = 0.0
    calls: Sequence[Call] = ()


def rotate(
    calls: Sequence[Call], device: torch.device, *, min_seconds: float = MIN_REPLAY_S
) -> Rotation:
    """Capture the calls, in turn and again and again, into one CUDA graph.

    What a call returns is kept until its next turn, as in a model whose outputs are used. On the
    CPU each replay calls them once.

    Args:
        calls: one per input set; on CUDA they must be ready to be captured.
        device: where they run.
        min_seconds: the least time of one replay.
    """
    if device.type != "cuda":
        return Rotation(lambda: [call() for call in calls], len(calls))
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still be making the inputs
    with torch.cuda.stream(stream):
        calls[0]()  # allocates what libraries keep for each stream
    turns = 1
    while True:
        rotation = _capture(calls, turns * len(calls), stream)
        seconds = _seconds(rotation, device)
        if seconds >= min_seconds:
            return replace(rotation, seconds=seconds)
        turns = math.ceil(turns * _MARGIN * min_seconds / seconds)


def interleave(
    rotations: Sequence[Rotation], device: torch.device, *, start: int = 0, pace: Pace = RESTED
) -> list[list[float]]:
    """Return the seconds per launch of `REPLAYS` replays of each rotation.

    They take turns of a few replays, in an order that changes from turn to turn, so that all of
    them find the same heat.

    Args:
        rotations: what to time.
        device: where they run.
        start: which order comes first.
        pace: how a turn begins.
    """
    seconds: list[list[float]] = [[] for _ in rotations]
    for round_ in range(_ROUNDS):
        for index in turn_order(len(rotations), start + round_):
            rotation = rotations[index]
            time.sleep(pace.rest_s if device.type == "cuda" else 0)
            for _ in range(_run_in(rotation, pace)):
                rotation.replay()
            times = time_each(rotation.replay, device, REPLAYS // _ROUNDS)
            seconds[index] += [taken / rotation.launches for taken in times]
    return seconds


def turn_order(count: int, turn: int) -> list[int]:
    """Return the order of `count` participants: rotated every other turn, odd ones backwards."""
    order = [(index + turn // 2) % count for index in range(count)]
    return order[::-1] if turn % 2 else order


def _run_in(rotation: Rotation, pace: Pace) -> int:
    return math.ceil(pace.run_in_s / rotation.seconds) if rotation.seconds else 1


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all, since cuBLAS's workspace for a stream stays allocated.
    return torch.cuda.Stream(device)


def _capture(calls: Sequence[Call], launches: int, stream: torch.cuda.Stream) -> Rotation:
    graph = torch.cuda.CUDAGraph()
    kept: list[object] = [None] * len(calls)
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    # Not torch.cuda.graph(), which collects garbage and empties torch's cache every time.
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for index in range(launches):
                kept[index % len(calls)] = calls[index % len(calls)]()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return Rotation(graph.replay, launches, calls=calls)


def _seconds(rotation: Rotation, device: torch.device) -> float:
    rotation.replay()
    return statistics.median(time_each(rotation.replay, device, 3))
