"""Captures on two GPUs, with an all-reduce of NCCL inside the graph."""

import pytest
import torch
from graphs_process_group import FAILING, NCCL_SCENARIOS, run_ranks, work_on_gpus

GPUS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < GPUS, reason=f"needs {GPUS} GPUs, one for each rank"
    ),
]


@pytest.fixture(scope="module")
def told():
    """What both ranks report of every scenario; the processes start once for all."""
    results = run_ranks(work_on_gpus, GPUS, list(NCCL_SCENARIOS))
    assert not [r for ranks in results.values() for r in ranks.values() if "crashed" in r], results
    return results


def test_the_all_reduce_is_in_the_graph(told):
    for result in told["agree"].values():
        assert result["capture"]["kind"] == result["again"]["kind"] == "NoneType", result
        assert result["totals"] == [103, 120]


def test_a_burst_of_collectives_is_refused_by_name(told):
    # NCCL (2.28) captures events of its own, which no loop on the device can hold.
    for result in told["burst"].values():
        assert result["first"]["kind"] in ("BurstError", "RankError"), result
        assert ", event " in result["first"]["message"]


def test_a_failed_capture_is_told_by_both_and_can_be_repeated(told):
    failing, other = told["capture"][FAILING], told["capture"][1 - FAILING]
    assert failing["first"]["kind"] == "CaptureError"
    assert other["first"]["kind"] == "RankError"
    assert f"rank {FAILING} failed: CaptureError" in other["first"]["message"]
    for result in (failing, other):
        assert result["again"]["kind"] == "NoneType", result["again"]["message"]
        assert result["totals"] == [103, 120]


def test_who_waits_on_the_device_for_a_failed_rank_is_freed(told):
    failing, other = told["warm-up"][FAILING], told["warm-up"][1 - FAILING]
    assert failing["first"]["kind"] == "CaptureError"
    assert other["first"]["kind"] == "RankError"
    assert f"rank {FAILING} failed: CaptureError" in other["first"]["message"]
    assert other["first"]["seconds"] < 30
    assert other["refused"]["kind"] == "NotCapturedError"


def test_runners_are_closed_before_their_group(told):
    for result in told["teardown"].values():
        assert result["closing"]["kind"] == result["destroying"]["kind"] == "NoneType", result
        assert result["closing"]["seconds"] + result["destroying"]["seconds"] < 20
