"""Reading ptxas's reports, and holding them against limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_probe import PTXAS_LOG

from ostinato.jit.budgets import LIMITS, Usage, excesses, parse_ptxas, read_budgets, write_budgets
from ostinato.ops.catalogue import CATALOGUE

BUDGETS = Path(__file__).parents[2] / "docs" / "kernel_budgets.json"
_BUDGET = {"registers": 168, "stack": 0, "spills": 0, "smem": 128}

_SPILLING = """\
ptxas info    : Compiling entry function '_Z5spillv' for 'sm_90a'
ptxas info    : Function properties for _Z5spillv
    96 bytes stack frame, 40 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 96 bytes cumulative stack size
ptxas info    : Function properties for _Z6calledv
    112 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
_SERIALISED = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to the presence of Extern calls in the function '_Z5probe'
"""


def test_one_kernel() -> None:
    assert parse_ptxas(PTXAS_LOG) == Usage(registers=42, stack=0, spills=0, smem=128)


def test_the_worst_of_several_kernels_counts() -> None:
    usage = parse_ptxas(PTXAS_LOG + _SPILLING)
    assert usage == Usage(registers=255, stack=112, spills=64, smem=128)


def test_serialised_wgmma_is_noticed_once() -> None:
    usage = parse_ptxas(PTXAS_LOG + _SERIALISED + _SERIALISED)
    assert len(usage.warnings) == 1
    assert usage.warnings[0].startswith("C7510 Potential Performance Loss: wgmma")


@pytest.mark.parametrize("log", ["", "ptxas info    : 0 bytes gmem\n"])
def test_a_log_without_kernels_is_an_error(log: str) -> None:
    with pytest.raises(ValueError, match="no kernel in ptxas's output"):
        parse_ptxas(log)


@given(
    registers=st.integers(0, 255),
    stack=st.integers(0, 1 << 18),
    stores=st.integers(0, 1 << 16),
    loads=st.integers(0, 1 << 16),
    smem=st.integers(0, 1 << 18),
)
def test_any_figures(registers: int, stack: int, stores: int, loads: int, smem: int) -> None:
    shown = f", {smem} bytes smem" if smem else ""
    log = (
        "ptxas info    : Compiling entry function '_Z1k' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z1k\n"
        f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 0 barriers{shown}, 400 bytes cmem[0]\n"
    )
    assert parse_ptxas(log) == Usage(registers, stack, stores + loads, smem)


def test_within_budget() -> None:
    assert excesses(Usage(168, 0, 0, 128), _BUDGET) == []
    assert excesses(Usage(1, 0, 0, 0), _BUDGET) == []


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (Usage(169, 0, 0, 0), "registers: got 169, expected at most 168"),
        (Usage(1, 8, 0, 0), "stack: got 8, expected at most 0"),
        (Usage(1, 0, 4, 0), "spills: got 4, expected at most 0"),
        (Usage(1, 0, 0, 129), "smem: got 129, expected at most 128"),
        (Usage(1, 0, 0, 0, ("C7510 serialised",)), "C7510 serialised"),
    ],
)
def test_over_budget(usage: Usage, words: str) -> None:
    assert excesses(usage, _BUDGET) == [words]


def test_no_budget_is_wrong_too() -> None:
    assert excesses(Usage(1, 0, 0, 0), None) == ["it has no budget"]


def test_budgets_are_written_sorted_and_others_kept(tmp_path: Path) -> None:
    file = tmp_path / "budgets.json"
    write_budgets(file, {"b": Usage(10, 0, 0, 1), "c": Usage(3, 0, 0, 3)})
    write_budgets(file, {"a": Usage(20, 0, 0, 2), "b": Usage(11, 0, 0, 1)})
    assert list(read_budgets(file)) == ["a", "b", "c"]
    assert read_budgets(file)["b"] == {"registers": 11, "stack": 0, "spills": 0, "smem": 1}
    assert len(file.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ('{"k": 3}', "k: got 3, expected integers"),
        (json.dumps({"k": {**_BUDGET, "spills": "0"}}), "k: got"),
        (json.dumps({"k": {"registers": 1}}), "k: got"),
    ],
)
def test_wrong_budget_files(tmp_path: Path, document: str, match: str) -> None:
    file = tmp_path / "budgets.json"
    file.write_text(document)
    with pytest.raises(ValueError, match=match):
        read_budgets(file)


# It spills two registers (docs/notebooks/decode.md, v19 and "Missed"); no other kernel may.
_ALLOWED_SPILLS = {"attention_decode-bf16-e4m3_kv-d256-c32": 8}


def test_the_committed_budgets_are_of_kernels_that_exist_and_allow_no_local_memory() -> None:
    budgets = read_budgets(BUDGETS)
    assert set(budgets) <= {variant.name for variant in CATALOGUE}
    spills = {name: budget["spills"] for name, budget in budgets.items() if budget["spills"]}
    assert spills == _ALLOWED_SPILLS
    assert {name for name, budget in budgets.items() if budget["stack"]} == set(_ALLOWED_SPILLS)
    assert all(set(budget) == set(LIMITS) for budget in budgets.values())
