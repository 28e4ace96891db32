"""Ranks that are killed, stopped or fail, anywhere: all others end by themselves, and say who."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from rank_forks import run_cases

from effort import LONG, effort

# Of places that are come to often, one of the first so many times.
PLACES = {"start": 1, "load": 1, "engine": 1, "capture": 5, "serving": 20, "idle": 18, "caller": 30}
KINDS = ("kill", "stop", "value", "runtime", "memory", "exit")
HANGS = ("serving",)  # places in which a rank may also hang, though its threads live
RAISED = {"value": "ValueError", "runtime": "RuntimeError", "memory": "OutOfMemoryError"}
TIMEOUT_S = 16.0
GPU_TIMEOUT_S = 24.0  # half of it is enough for many processes to take their GPUs at once


def random_fault(
    generator: random.Random, sizes: Sequence[int], device: str = "cpu"
) -> dict[str, Any]:
    size = generator.choice(sizes)
    place = generator.choice(list(PLACES))
    rank = generator.randrange(size)
    if place == "idle":  # rank 0 waits for nobody's calls
        rank = generator.randrange(1, size)
    if place == "caller":
        rank = 0
    count = 1 + generator.randrange(PLACES[place])
    kinds = (*KINDS, "hang") if place in HANGS else KINDS
    # When rank 0 leaves in its work, that is the end of the others', too.
    kind = generator.choice(kinds if rank == 0 or place == "start" else (*kinds, "leave"))
    return {
        "scenario": "serve",
        "device": device,
        "size": size,
        "timeout_s": TIMEOUT_S if device == "cpu" else GPU_TIMEOUT_S,
        "keeper": generator.random() < 0.5,
        "fault": {"rank": rank, "place": place, "count": count, "kind": kind},
    }


# Where few are tried: an error, an end, a stall and who leaves early, each in another place.
SHORT = [
    *(("load", 1, 1, "memory"), ("serving", 9, 1, "kill"), ("idle", 5, 1, "stop")),
    *(("engine", 1, 1, "leave"), ("load", 1, 0, "leave")),
]
FAULTS = effort(
    [
        {
            "scenario": "serve",
            "size": 2,
            "timeout_s": TIMEOUT_S,
            "keeper": rank == 0,
            "fault": {"rank": rank, "place": place, "count": count, "kind": kind},
        }
        for place, count, rank, kind in SHORT
    ],
    [random_fault(random.Random(seed), [2, 2, 3, 4]) for seed in range(200)],
)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """The tokens that an engine alone hands out, in their order."""
    alone = {"scenario": "serve", "size": 1, "alone": True}
    (report,) = run_cases([alone], at_once=1)
    assert report["ranks"][0]["code"] == 0, report["ranks"][0]["stderr"]
    return list(report["ranks"][0]["told"][:-1])


@pytest.mark.timeout(1200)
def test_whatever_happens_to_one_rank_the_others_end(expected: list[dict[str, Any]]) -> None:
    reports = run_cases(FAULTS, at_once=effort(3, 8))
    wrong = [problem for report in reports for problem in problems(report, expected)]
    assert not wrong, f"{len(wrong)} faults went wrong\n" + "\n\n".join(map(str, wrong[:5]))
    if LONG:
        print(f"{len(reports)} faults, the longest {max(r['seconds'] for r in reports):.1f} s")


@pytest.mark.parametrize("rank", effort([0], [0, 1]))
def test_an_error_in_a_step_is_told_at_once(rank: int) -> None:
    fault = {"rank": rank, "place": "serving", "count": 9, "kind": "value"}
    (report,) = run_cases([{**FAULTS[0], "timeout_s": 100.0, "fault": fault}], at_once=1)
    assert report["ranks"][rank]["told"][-1]["error"] == "ValueError"
    assert report["ranks"][1 - rank]["told"][-1]["failures"] == {
        str(rank): "failed: ValueError: injected"
    }
    # Else after three quarters of the timeout, when gloo gives up.
    assert report["seconds"] < 50


def problems(report: dict[str, Any], expected: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with how a case went."""
    fault, ranks = report["case"]["fault"], report["ranks"]
    found = []
    for rank, told in enumerate(ranks):
        said = told["told"][-1] if told["told"] else {}
        if rank == fault["rank"]:
            own = {RAISED.get(fault["kind"])}
            if fault["place"] == "capture":
                own.add("CaptureError")
            if fault["kind"] in RAISED and said.get("error") not in own:
                found.append(f"the faulty rank {rank} did not say so: {said}")
        elif told["code"] is None:
            found.append(f"rank {rank} hangs")
        elif told["code"] == 1 and f"rank {fault['rank']} " in told["stderr"]:
            continue  # the watchdog ended it, and said why
        elif said.get("error") != "RankError" or list(said["failures"]) != [str(fault["rank"])]:
            found.append(f"rank {rank} (code {told['code']}) said {said}")
        elif (  # before the start nobody hears a rank
            fault["kind"] in RAISED
            and fault["place"] != "start"
            and "injected" not in said["message"]
        ):
            found.append(f"rank {rank} does not say what happened: {said['message']}")
    tokens = [line for line in ranks[0]["told"] if "token" in line]
    if tokens != expected[: len(tokens)]:
        found.append(f"a wrong token: {tokens}")
    details = "\n".join(f"rank {r}: {told['stderr'][-900:]}" for r, told in enumerate(ranks))
    return [f"{report['case']}, {report['seconds']:.1f} s: {text}\n{details}" for text in found]
