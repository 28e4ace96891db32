"""Captures in several processes: all succeed or all fail, and nobody hangs."""

import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from graphs_process_group import FAILING, SCENARIOS, run_ranks, work

from ostinato.graphs.backends.cuda import CudaBackend
from ostinato.graphs.errors import RankError
from ostinato.graphs.process_group import CaptureGroup

SIZES = [2, 4]


@pytest.fixture(scope="module")
def told_by_size():
    """The reports of groups of each size; both wait most of the time, so they run side by side."""
    with ThreadPoolExecutor(len(SIZES)) as pool:
        running = {size: pool.submit(run_ranks, work, size, list(SCENARIOS)) for size in SIZES}
        return {size: future.result() for size, future in running.items()}


@pytest.fixture(scope="module", params=SIZES)
def told(request, told_by_size):
    """What every rank reports of every scenario, by name; processes start once for all."""
    results = told_by_size[request.param]
    assert not [r for ranks in results.values() for r in ranks.values() if "crashed" in r]
    return request.param, results


def split(told, name):
    """Return the size, what the failing rank reports, and what the others do."""
    size, results = told
    ranks = dict(results[name])
    assert len(ranks) == size
    failing = ranks.pop(FAILING)
    return size, failing, list(ranks.values())


def test_all_capture_and_run_together(told):
    size, results = told
    rows = [sum(range(1, size + 1)), 10 * size]
    offset = sum(100 * rank for rank in range(size))
    for result in results["agree"].values():
        assert result["capture"]["kind"] == result["again"]["kind"] == "NoneType"
        assert result["totals"] == [row + offset for row in rows]


@pytest.mark.parametrize("phase", ["warm-up", "capture", "verification"])
def test_a_failure_of_one_rank_is_told_by_all(phase, told):
    _, failing, others = split(told, phase)
    words = {"warm-up": "warm up", "capture": "capture", "verification": "verify"}[phase]
    assert failing["first"]["kind"] == "CaptureError"
    assert f"could not {words} batch size" in failing["first"]["message"]
    for other in others:
        assert other["first"]["kind"] == "RankError"
        # Of those that came out of a collective by an error, some say so before others.
        assert FAILING in other["first"]["failures"]
        assert f"rank {FAILING} failed: CaptureError" in other["first"]["message"]
        assert "OverflowError" in other["first"]["message"]
    for result in [failing, *others]:
        assert result["first"]["seconds"] < 20
        assert result["refused"]["kind"] == "NotCapturedError"


def test_after_a_failed_capture_the_same_runners_capture_again(told):
    size, failing, others = split(told, "capture")
    for result in [failing, *others]:
        assert result["again"]["kind"] == "NoneType", result["again"]["message"]
        assert result["totals"][1] == 10 * size + sum(100 * rank for rank in range(size))


def test_a_difference_on_one_rank_is_told_by_all(told):
    _, failing, others = split(told, "difference")
    assert failing["first"]["kind"] == "VerificationError"
    for other in others:
        assert other["first"]["kind"] == "RankError"
        assert f"rank {FAILING} failed: VerificationError" in other["first"]["message"]
        assert "the replay differs from the step" in other["first"]["message"]


def test_ranks_that_capture_different_sizes_say_so(told):
    size, failing, others = split(told, "sizes")
    for result in [failing, *others]:
        assert result["first"]["kind"] == "RankError"
        assert result["again"]["kind"] == "NoneType", result["again"]["message"]
        assert result["totals"][1] == 10 * size + sum(100 * rank for rank in range(size))
    assert "at 'the capture of batch size 2, verify" in others[0]["first"]["message"].replace(
        '"', "'"
    )
    assert "every rank must capture the same" in failing["first"]["message"]


def test_a_rank_that_comes_too_late_is_named(told):
    _, failing, others = split(told, "late")
    for result in [failing, *others]:
        assert result["first"]["kind"] == result["again"]["kind"] == "RankError"
        assert f"rank {FAILING} did not come" in result["first"]["message"]
        assert "out of step" in result["again"]["message"]


def test_a_dead_rank_is_named(told):
    size, results = told
    assert sorted(results["dead"]) == [rank for rank in range(size) if rank != FAILING]
    for result in results["dead"].values():
        assert result["first"]["kind"] == "RankError"
        assert f"rank {FAILING} did not come" in result["first"]["message"]
        assert result["first"]["seconds"] < 15


class Two:
    """Looks like a group of two, of which this process is the first."""

    group_name = "two"

    def size(self):
        return 2

    def rank(self):
        return 0

    def abort(self):
        self.aborted = True

    def get_group_store(self):
        return torch.distributed.HashStore()


def test_an_abort_frees_a_device_waiting_for_a_failed_rank(monkeypatch):
    monkeypatch.setattr("ostinato.graphs.process_group._IDLE_S", 0.0)
    monkeypatch.setattr("ostinato.graphs.process_group._ABORT_S", 0.0)
    monkeypatch.setattr("ostinato.graphs.process_group._LINGER_S", 0.0)
    torchs = Two()
    group = CaptureGroup(torchs, 1.0)
    assert group.failed(RankError("rank 1 failed"), lambda: hasattr(torchs, "aborted")) == (
        None,
        True,
    )
    assert torchs.aborted
    with pytest.raises(RankError, match="aborted"):
        group.agree("the next capture")
    assert CaptureGroup(Two(), 1.0).failed(ValueError("here"), lambda: False) == (None, False)


def test_a_store_that_fails_is_an_error_of_ranks(monkeypatch):
    def broken(*_):
        raise RuntimeError("connection reset")

    group = CaptureGroup(Two(), 1.0)
    monkeypatch.setattr(group, "_posted", broken)
    with pytest.raises(RankError, match="connection reset"):
        group.agree("the start")


@pytest.mark.parametrize(
    ("timeout", "error"), [(0, ValueError), (math.nan, ValueError), ("5", TypeError)]
)
def test_a_timeout_that_is_none_is_refused(timeout, error):
    with pytest.raises(error, match="group_timeout_s: got"):
        CaptureGroup(None, timeout)


@pytest.mark.parametrize("microseconds", [1.0, 4_999.0, 20_000.0])
@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_time_equally_many_replays(size, microseconds, monkeypatch):
    did = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            pass

        def synchronize(self):
            did.append("wait")

        def elapsed_time(self, end):
            return microseconds / 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    group = SimpleNamespace(size=size, agree=lambda at: did.append("meet"))
    graph = SimpleNamespace(replay=lambda: did.append("replay"))
    median = CudaBackend.replay_us(SimpleNamespace(_stream=None), graph, group)
    assert median == pytest.approx(microseconds)
    if size > 1:  # whatever a rank's own times are: a replay's all-reduce needs all of them
        assert did == ["replay"] * 4 + ["meet", "wait"]
    else:
        assert did.count("replay") == (2 if microseconds > 10_000 else 4)
