"""What a step of a burst may do with its input buffers, which nobody stages anew in between."""

import math

import pytest
import torch

from ostinato.graphs import (
    Add,
    BufferSpec,
    BurstError,
    BurstRules,
    Feed,
    GraphRunner,
    Misses,
    StaticBuffers,
)


def small(generator, shape):
    return torch.randint(1, 9, shape, generator=generator)


NUMBER = BufferSpec((), torch.int64, 0, small)
SPECS = {"tokens": NUMBER, "position": NUMBER, "scale": BufferSpec((2,), torch.float32, math.nan)}
RULES = BurstRules({"tokens": Feed("tokens"), "position": Add()})


def make(step, device, rules=RULES):
    return GraphRunner(step, StaticBuffers(SPECS, 2, device), burst=rules)


def counting(batch):
    batch.position.add_(1)
    return {"tokens": batch.tokens * 3 + batch.position}


def clamping(batch):
    """Leaves padding as it is."""
    return {"tokens": batch.tokens.clamp_(max=4) + batch.position}


@pytest.mark.parametrize(
    ("step", "verify", "name"),
    [(counting, True, "position"), (counting, False, "position"), (clamping, True, "tokens")],
)
def test_a_step_that_writes_to_its_inputs_is_refused_for_bursts(step, verify, name, device):
    with make(step, device) as runner:
        with pytest.raises(BurstError, match=rf"writes to its input buffer '{name}'.*clone"):
            runner.capture([1, 2], verify=verify)
        assert runner.batch_sizes == ()
        with pytest.raises(BurstError, match=name):
            runner.capture([1], misses=Misses("capture", [1, 2]), verify=verify)


def test_without_rules_a_step_may_write_to_its_inputs(device):
    with make(counting, device, rules=None) as runner:
        runner.capture([2])
        for _ in range(2):
            outputs = runner.run(1, {"tokens": [1], "position": [5], "scale": [[0.5, 0.5]]})
            assert outputs["tokens"].tolist() == [9]


def test_steps_that_write_to_clones_give_the_tokens_of_runs(device):
    def step(batch):
        position = batch.position.clone().add_(1)
        return {"tokens": batch.tokens * 3 + position}

    with make(step, device) as runner:
        runner.capture([2])
        inputs = {"tokens": [1], "position": [0], "scale": [[0.5, 0.5]]}
        assert list(runner.burst(1, inputs, 4)) == [[4], [14], [45], [139]]


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(-1, 1)[:, 0]])
def test_a_buffer_cannot_be_fed_from_a_view_of_a_buffer(view, device):
    rules = BurstRules({"tokens": Feed("tokens"), "position": Feed("last")})

    def step(batch):
        return {"tokens": batch.tokens + 1, "last": view(batch.tokens)}

    with make(step, device, rules) as runner:
        with pytest.raises(BurstError, match=r"next\['position'\]: .* output\['last'\].*clone"):
            runner.capture([1, 2], verify=False)
        assert runner.batch_sizes == ()


def test_a_buffer_may_be_fed_from_a_clone_of_a_buffer(device):
    rules = BurstRules({"tokens": Feed("tokens"), "position": Feed("last")})

    def step(batch):
        other = batch.scale[:, 0]  # a view of a buffer that feeds none
        return {"tokens": batch.tokens + batch.position, "last": batch.tokens.clone(), "x": other}

    with make(step, device, rules) as runner:
        runner.capture([2])
        inputs = {"tokens": [1, 10], "position": [0, 1], "scale": [[0.5, 0.5]] * 2}
        burst = runner.burst(2, inputs, 4)
        assert list(burst) == [[1, 11], [2, 21], [3, 32], [5, 53]]
