"""What failed captures of a real GPU say, and that the process is healthy after each."""

import contextlib
import ctypes

import pytest
import torch
from graphs_sins import copy_unpinned, leave_a_fork, read_device, wait_for_the_device
from graphs_toys import ToyStep, toy_inputs

from ostinato.graphs import AuditError, CaptureError, VerificationError

pytestmark = pytest.mark.gpu

CUDA = "cuda"


@pytest.fixture
def device():
    """Only CUDA: everything here runs under `make test-gpu` alone."""
    return torch.device(CUDA)


def branch_on_device(batch):
    if batch.hidden.max() > 0:
        batch.hidden.add_(0)


def swallow_a_failure(batch):
    with contextlib.suppress(RuntimeError):
        batch.tokens.sum().item()


def make_from_numbers(batch):
    torch.tensor([1.0, 2.0], device=CUDA)


def print_a_tensor(batch):
    str(batch.tokens)


def allocate_with_another_library(batch):
    address = ctypes.c_uint64()
    ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 21))
    batch.hidden + 1


def diagnose(sin, make_runner):
    """Return the diagnosis of a capture in which `sin` is done, and check the health after it."""
    toy, repent = ToyStep(), False

    def step(batch):
        if torch.cuda.is_current_stream_capturing() and not repent:
            sin(batch)
        return toy(batch)

    runner = make_runner(step)
    with pytest.raises(CaptureError, match="could not capture batch size 4") as info:
        runner.capture([2, 4])
    repent = True
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    torch.rand(3, device=CUDA)
    runner.capture([2, 4])
    out = runner.run(3, toy_inputs(3) | {"tokens": [1, 2, 3]})
    assert out["tokens"].tolist() == [3, 5, 7]
    print(info.value)  # shown when an assertion fails
    return info.value.diagnosis


@pytest.mark.parametrize(
    ("sin", "line", "remedy"),
    [
        (read_device, "batch.tokens.sum().item()", "reads values of the device on the host"),
        (branch_on_device, "if batch.hidden.max() > 0:", "reads values of the device on the host"),
        (swallow_a_failure, "batch.tokens.sum().item()", "reads values of the device on the host"),
        (copy_unpinned, "batch.hidden.copy_(torch.zeros(batch.hidden.shape))", "a copy between"),
        (make_from_numbers, "torch.tensor([1.0, 2.0], device=CUDA)", "a copy between the host"),
        (wait_for_the_device, "torch.cuda.synchronize()", "the step waits for the device"),
    ],
)
def test_the_line_and_the_remedy_of_known_failures(sin, line, remedy, make_runner):
    diagnosis = diagnose(sin, make_runner)
    assert diagnosis.line.text == line
    assert diagnosis.line.function == sin.__name__
    assert remedy in diagnosis.remedy


@pytest.mark.parametrize("sin", [read_device, branch_on_device, swallow_a_failure])
def test_the_operator_that_reads_the_device_is_named(sin, make_runner):
    assert "_local_scalar_dense" in diagnose(sin, make_runner).operator


def test_printing_a_tensor_names_the_users_line(make_runner):
    assert diagnose(print_a_tensor, make_runner).line.text == "str(batch.tokens)"


def test_a_fork_that_is_not_joined_has_a_remedy(make_runner):
    assert "wait_stream(other) at its end" in diagnose(leave_a_fork, make_runner).remedy


def test_another_librarys_allocation_is_located(make_runner):
    diagnosis = diagnose(allocate_with_another_library, make_runner)
    assert "before aten.add.Tensor at " in diagnosis.place
    assert "batch.hidden + 1" in diagnosis.place


def test_the_drivers_log_names_its_call_and_the_remedy_follows(make_runner):
    diagnosis = diagnose(allocate_with_another_library, make_runner)
    assert any("cuMemAlloc" in reason for reason in diagnosis.reasons), diagnosis
    assert "a library allocates or frees memory by itself" in diagnosis.remedy


@pytest.mark.parametrize(
    ("audit", "error"), [("strict", AuditError), ("report", VerificationError)]
)
def test_work_on_a_stream_that_is_not_captured_is_named(audit, error, make_runner):
    other = torch.cuda.Stream()
    out = torch.empty(4, dtype=torch.int64, device="cuda")

    def step(batch):
        """Compute on a stream that is not captured, safely while nothing is."""
        eager = not torch.cuda.is_current_stream_capturing()
        if eager:
            torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.mul(batch.tokens, 2, out=out)
        if eager:
            torch.cuda.synchronize()
        return out

    runner = make_runner(step)
    match = r"on a stream that is not captured ran aten\.mul\.\w+ at .*torch\.mul\(batch\.tokens"
    with pytest.raises(error, match=match):
        runner.capture([4], audit=audit)
