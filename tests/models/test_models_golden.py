"""Logits and greedy texts of every family and weight format are those that were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_logits
import pytest
import torch

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("golden_logits.json").read_text(encoding="utf-8")
)
SAME_MACHINE = RECORDED["machine"] == golden_logits.machine()
# Of the largest logit. Other CPUs round sums otherwise, which may move an activation to the next
# 8-bit code. Another RoPE type or window moves these logits by 0.7 and more.
TOLERANCES = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1, "quantised": 0.3}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    threads = torch.get_num_threads()
    try:
        return golden_logits.outcomes()
    finally:
        torch.set_num_threads(threads)


def test_each_recorded_model_is_made_and_no_other(found: dict[str, dict[str, Any]]) -> None:
    assert list(found) == list(RECORDED["models"])


def test_logits_are_the_recorded_ones(found: dict[str, dict[str, Any]]) -> None:
    for name, recorded in RECORDED["models"].items():
        tolerance = TOLERANCES.get(name.rpartition(" ")[2], TOLERANCES["quantised"])
        expected = torch.tensor(recorded["logits"])
        torch.testing.assert_close(
            torch.tensor(found[name]["logits"]),
            expected,
            rtol=0.0,
            atol=tolerance * float(expected.abs().max()),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_texts_of_fp32_models_are_the_recorded_ones(found: dict[str, dict[str, Any]]) -> None:
    for name, recorded in RECORDED["models"].items():
        if name.endswith(" fp32"):
            assert found[name]["texts"] == recorded["texts"], name


@pytest.mark.skipif(not SAME_MACHINE, reason=f"recorded on {RECORDED['machine']}")
def test_bits_are_the_recorded_ones_on_such_a_machine(found: dict[str, dict[str, Any]]) -> None:
    differing = [name for name, row in RECORDED["models"].items() if found[name] != row]
    assert differing == []
