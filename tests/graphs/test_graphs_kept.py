"""What a runner keeps for each number of rows: as much for a thousand of them as for some."""

import gc

import pytest
import torch
from graphs_toys import toy_inputs

from ostinato.graphs import Variant
from ostinato.graphs.kept import keep

MOST_ROWS = 1000


def tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("on_device", [False, True])
def test_tensors_do_not_grow_with_numbers_of_rows(on_device, step, make_runner, device):
    runner = make_runner(step, MOST_ROWS)
    runner.capture([MOST_ROWS])
    some, whole = MOST_ROWS // 2, toy_inputs(MOST_ROWS, device if on_device else "cpu")
    expected = {name: rows.clone() for name, rows in runner.run(MOST_ROWS, whole).items()}

    def run(n):
        outputs = runner.run(n, {name: rows[:n] for name, rows in whole.items()})
        for name, rows in outputs.items():
            assert torch.equal(rows, expected[name][:n])

    for n in range(1, some):
        run(n)
    before = tensors()
    for n in range(some, MOST_ROWS):
        run(n)
    # Some are those of the runs that are repeated fast.
    assert tensors() - before < some
    run(1)  # of which nothing is kept any more


def test_a_run_whose_rows_are_kept_returns_the_same_tensors(step, make_runner):
    runner = make_runner(step, MOST_ROWS)
    runner.capture({Variant(): [8, MOST_ROWS]})
    first = runner.run(3, toy_inputs(3))["hidden"]
    assert runner.run(3, toy_inputs(3))["hidden"] is first
    for n in range(9, 500):  # of another graph
        runner.run(n, toy_inputs(n))
    assert runner.run(3, toy_inputs(3))["hidden"] is first


def test_the_oldest_goes_first():
    kept: dict[int, str] = {}
    for key in range(300):
        keep(kept, key, str(key))
        assert key in kept
    assert list(kept) == list(range(300 - len(kept), 300))
    assert len(kept) >= 100
