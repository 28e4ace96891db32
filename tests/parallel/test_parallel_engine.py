"""An engine on several ranks gives the texts of one, whatever it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from rank_cases import OPTIONS, USES
from rank_forks import run_cases

from effort import LONG, effort

SIZES = effort([2], [2, 3, 4])
# A process that compiles grammars takes its time to start.
SKIPPED = [] if LONG else ["structured"]
OTHERS = {
    "pages": {"scenario": "pages", "size": 2},
    "options": {"scenario": "options", "size": 2},
    "partitions": {"scenario": "partitions", "size": 3},
    "odd follower": {"scenario": "tokens", "size": 3, "odd": 1},
    "odd rank 0": {"scenario": "tokens", "size": 3, "odd": 0},
    "odd of two": {"scenario": "tokens", "size": 2, "odd": 1},
}


@pytest.fixture(scope="module")
def reports() -> dict[Any, Any]:
    """What the ranks of each case have told; one process starts once for all."""
    used: dict[str, Any] = {"scenario": "everything", "skipped": SKIPPED, "timeout_s": 60}
    cases: dict[Any, dict[str, Any]] = {1: {**used, "size": 1, "alone": True}}
    cases |= {size: {**used, "size": size, "keeper": size == 3} for size in SIZES}
    cases |= {name: {**case, "timeout_s": 60} for name, case in OTHERS.items()}
    return dict(zip(cases, run_cases(list(cases.values()), at_once=2), strict=True))


def told(report: dict[str, Any]) -> list[Any]:
    """Return what rank 0 has told, once all ranks have ended well."""
    for rank in report["ranks"]:
        assert rank["code"] == 0, rank["stderr"]
    found: list[Any] = report["ranks"][0]["told"]
    return found


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("size", SIZES)
def test_what_ranks_serve_is_what_one_serves(reports: Any, size: int, name: str) -> None:
    if name in SKIPPED:
        pytest.skip("`make test-long` has it")
    alone = {line["use"]: line["result"] for line in told(reports[1]) if "use" in line}
    together = {line["use"]: line["result"] for line in told(reports[size]) if "use" in line}
    assert alone[name]
    assert together[name] == alone[name]


def test_all_have_as_many_pages_as_the_rank_with_the_fewest(reports: Any) -> None:
    told(reports["pages"])
    counts = [rank["told"][0]["pages"] for rank in reports["pages"]["ranks"]]
    assert len(set(counts)) == 1


def test_other_arguments_on_one_rank_are_refused_by_all(reports: Any) -> None:
    for rank in reports["options"]["ranks"]:
        (said,) = rank["told"]
        assert said["error"] == "ValueError"
        assert said["message"] == "max_batch: got 4 on rank 1, expected 3 as on rank 0"


def test_where_pages_lie_is_no_matter_of_what_is_found(reports: Any) -> None:
    *_, counts, ended = told(reports["partitions"])
    assert ended == {"ended": True}
    assert counts["evictions"] > 20
    assert counts["shared"] > 100


@pytest.mark.parametrize("name", ["odd follower", "odd rank 0", "odd of two"])
def test_no_token_is_handed_out_that_ranks_do_not_share(reports: Any, name: str) -> None:
    odd = OTHERS[name]["odd"]
    for rank in reports[name]["ranks"]:
        said = rank["told"][-1]
        assert said["error"] == "RankError", rank["stderr"]
        assert list(said["failures"]) == [str(odd)]
    # The fifth token of the odd rank is the one that differs.
    assert len(reports[name]["ranks"][0]["told"]) <= 5


def test_every_use_has_a_known_engine() -> None:
    assert set(OPTIONS) <= set(USES)
