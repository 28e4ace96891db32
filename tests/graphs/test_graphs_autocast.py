"""Autocast around a runner: what a step computes depends on the step alone."""

import gc

import pytest
import torch

from ostinato.graphs import BufferSpec, CaptureError, GraphRunner, Misses, StaticBuffers

HIDDEN = {"x": BufferSpec((16,), torch.float32, 0.0)}


@pytest.fixture
def linear(device):
    return torch.nn.Linear(16, 16).to(device)


def make(step, device, linear):
    return GraphRunner(step, StaticBuffers(HIDDEN, 4, device), memory={"linear": linear})


def casting(linear, device):
    """Return a step that enters autocast itself."""

    def step(batch):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return linear(batch.x)

    return step


def test_a_capture_in_autocast_is_refused_and_changes_nothing(device, linear):
    with make(lambda batch: linear(batch.x), device, linear) as runner:
        runner.capture([2], progress=False)
        expected = runner.run(2, {"x": torch.ones(2, 16)}).clone()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            for capture in (lambda: runner.capture([4], progress=False), runner.recapture):
                with pytest.raises(CaptureError, match=f"autocast is on for {device.type}, exp"):
                    capture()
        assert runner.batch_sizes == (2,)
        assert torch.equal(runner.run(2, {"x": torch.ones(2, 16)}), expected)


def test_runs_and_misses_in_autocast_are_what_they_are_outside(device, linear):
    with make(lambda batch: linear(batch.x), device, linear) as runner:
        runner.capture([2], misses=Misses("eager", [4]), progress=False)
        for n in (2, 3):
            outside = runner.run(n, {"x": torch.ones(n, 16)}).clone()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                inside = runner.run(n, {"x": torch.ones(n, 16)})
                assert torch.is_autocast_enabled(device.type)
            assert inside.dtype is torch.float32
            assert torch.equal(inside, outside)


@pytest.mark.parametrize("around", [None, False], ids=["plain", "autocast(enabled=False)"])
def test_a_step_that_enters_autocast_keeps_no_copies_of_weights(device, linear, around):
    step = casting(linear, device)
    with make(step, device, linear) as runner:
        if around is None:
            runner.capture([2], progress=False, audit="strict" if device.type == "cuda" else "off")
        else:
            with torch.autocast(device.type, enabled=around):
                runner.capture([2], progress=False)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        # New weights in the same place, and something else where copies of the old may have been.
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        spoilt = [torch.full((16, 16), torch.nan, device=device).bfloat16() for _ in range(64)]
        x = torch.randn(2, 16)
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
            expected = linear(x.to(device))
        assert torch.equal(runner.run(2, {"x": x}), expected)
        del spoilt
