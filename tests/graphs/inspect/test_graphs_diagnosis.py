"""What a failed capture says: line, operator, the driver's reason, the remedy."""

import contextlib
import ctypes
import inspect

import pytest
import torch
from graphs_fakes import RecordingBackend
from graphs_toys import SPECS, ToyStep, toy_inputs

from ostinato.graphs import AuditError, CaptureError, GraphRunner, StaticBuffers, VerificationError
from ostinato.graphs.failures import Call, Diagnosis, Failure, Line, Trace
from ostinato.graphs.inspect.diagnosis import diagnose, find_remedy
from ostinato.graphs.inspect.driver_log import DriverLog
from ostinato.graphs.inspect.nodes import GraphNodes
from ostinato.graphs.inspect.op_trace import OperatorWatch

HERE = Line("model.py", 12, "forward", "x = y.item()")
ITEM = Call("aten._local_scalar_dense.default", HERE)


def line_number_of(text):
    lines, first = inspect.getsourcelines(inspect.getmodule(line_number_of))
    return first + next(i for i, line in enumerate(lines, 1) if line.strip() == text)


@pytest.fixture
def backend(monkeypatch):
    backend = RecordingBackend(GraphNodes([], []))
    monkeypatch.setattr("ostinato.graphs.runner.backend_for", lambda *a: backend)
    return backend


def runner_of(step):
    return GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))


@pytest.mark.parametrize(("call", "phase"), [(0, "warm up"), (2, "capture"), (3, "verify")])
def test_the_users_line_is_named_in_every_phase(call, phase):
    calls = []

    def step(batch):
        calls.append(batch)
        if len(calls) > call:
            batch.hidden @ batch.tokens[:, None, None]  # a mistake
        return batch.tokens + 1

    with pytest.raises(CaptureError, match=f"could not {phase} batch size 2") as info:
        runner_of(step).capture([2])
    line = info.value.diagnosis.line
    text = "batch.hidden @ batch.tokens[:, None, None]  # a mistake"
    assert (line.file, line.function, line.text) == (__file__, "step", text)
    assert line.number == line_number_of(text)
    assert f"at: {__file__}:{line.number} in step: {text}" in str(info.value)
    assert isinstance(info.value.__cause__, RuntimeError)


def test_the_innermost_line_of_the_users_is_named():
    def helper(batch):
        return torch.nn.functional.linear(batch.hidden, batch.hidden[0, 0])

    with pytest.raises(CaptureError) as info:
        runner_of(lambda batch: helper(batch)).capture([2])
    assert info.value.diagnosis.line.function == "helper"


def test_out_of_memory_has_a_remedy_in_every_phase():
    def step(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    with pytest.raises(CaptureError, match="remedy: the device is out of memory: capture fewer"):
        runner_of(step).capture([2])


def test_a_failure_of_the_second_capture_is_diagnosed(backend):
    captures, failing = [], True

    def on_capture():
        captures.append(1)
        if failing and len(captures) == 2:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    backend.on_capture = on_capture
    reason = "Returning 900 (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) from cuStreamSynchronize"
    backend.failed = lambda: Failure([reason], Trace(failed=ITEM))
    runner = runner_of(ToyStep())
    with pytest.raises(CaptureError) as info:
        runner.capture([1, 2, 4])
    assert str(info.value).splitlines() == [
        "could not capture batch size 2: RuntimeError: CUDA error: operation not permitted when "
        "stream is capturing",
        "  at: model.py:12 in forward: x = y.item()",
        "  operator: aten._local_scalar_dense.default",
        f"  driver: {reason}",
        "  remedy: the step reads values of the device on the host, which a graph cannot do: "
        "decide on the device (torch.where, a mask, an index tensor), or make the value an input",
    ]
    failing = False
    runner.capture([1, 2, 4])
    assert runner.run(1, toy_inputs(1) | {"tokens": [1]})["tokens"].tolist() == [3]


def test_a_backend_that_cannot_tell_does_not_hide_the_error(backend):
    def fail():
        raise OSError("no driver")

    backend.on_capture = backend.failed = fail
    with pytest.raises(CaptureError, match=r"OSError: no driver\n.*\n  driver: a second capture"):
        runner_of(ToyStep()).capture([1])


def test_a_foreign_call_is_located_between_operators():
    before, after = Call("aten.add.Tensor", HERE), Call("aten.mul.Tensor", HERE)
    reasons = ["Returning 900 from cuMemAlloc_v2"]
    try:
        raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:  # raised by the innocent operator after it
        diagnosis = diagnose(error, Failure(reasons, Trace(between=(before, after))))
    assert diagnosis.line is None
    assert diagnosis.place == f"after {before}, before {after}"
    assert "a library allocates or frees memory by itself" in diagnosis.remedy
    trace = Trace(between=(None, None))
    place = diagnose(RuntimeError(), Failure((), trace)).place
    assert place == "after the step's beginning, before the step's end"


def test_work_outside_of_the_capture_is_named():
    diagnosis = diagnose(RuntimeError(), Failure((), Trace(outside=[ITEM])))
    assert f"not captured: {ITEM}" in str(diagnosis)
    assert str(Diagnosis()) == ""


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor "
         "is pinned.", "a copy between the host and the device"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor "
         "is pinned.\naten._grouped_mm.default", 'set_experts_implementation("batched_mm")'),
        ("transformers.grouped_mm_fallback.default", 'set_experts_implementation("batched_mm")'),
        ("aten.nonzero.default\nexpert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonz",
         'set_experts_implementation("batched_mm")'),
        ("scale = torch.tensor(2.0, device=x.device)", "a copy between the host and the device"),
        ("aten._local_scalar_dense.default", "reads values of the device on the host"),
        ("aten.nonzero.default", "reads values of the device on the host"),
        ("if mask.any().item():", "reads values of the device on the host"),
        ("Returning 900 (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) from cuMemAlloc_v2",
         "a library allocates or frees memory"),
        ("Returning 900 (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) from cuMemFree_v2",
         "a library allocates or frees memory"),
        ("MissingKernelError: kernel gemm is not compiled and the stream is being captured: run",
         "something was to be compiled or loaded"),
        ("Returning 900 (...) from cuModuleLoadData", "something was to be compiled or loaded"),
        ("operation would make the legacy stream depend on a capturing blocking stream",
         "something uses the default stream"),
        ("attempt to terminate a thread-local capture sequence from another thread",
         "another thread worked on the stream"),
        ("CUDA error: capturing stream has unjoined work", "did not wait for it"),
        ("dependency created on uncaptured work in another stream", "work that is not captured"),
        ("torch.cuda.synchronize()", "the step waits for the device"),
        ("Returning 900 (...) from cuEventQuery", "the step waits for the device"),
        ("Offset increment outside graph capture encountered unexpectedly.", "random numbers"),
        ("Attempt to increase offset for a CUDA generator not in capture mode.", "random numbers"),
        ("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture", "random numbers"),
    ],
)  # fmt: skip
def test_remedies_of_known_failures(text, remedy):
    assert remedy in find_remedy([text])


def test_no_remedy_is_made_up():
    assert find_remedy(["ValueError: plain", "aten.add.Tensor", "y = x + 1"]) is None
    assert find_remedy(["ValueError: plain", "x = self.generator(philox.uniform(y))"]) is None


class Capture:
    """A capture that is lost at one operator, or between two, as the driver would tell."""

    def __init__(self):
        self.valid = self.captured = True

    def watch(self):
        return OperatorWatch(lambda: self.valid, lambda: self.captured, device_type="cpu")


def test_an_operator_that_ends_a_capture_silently_is_found():
    capture = Capture()

    x = torch.ones(3)
    watch = capture.watch()
    with watch:
        y = x + 1
        capture.valid = False
        z = y * 2
    trace = watch.finish(None)
    assert trace.failed is None
    before, after = trace.between
    assert (before.operator, after.operator) == ("aten.add.Tensor", "aten.mul.Tensor")
    assert (before.line.text, after.line.text) == ("y = x + 1", "z = y * 2")
    assert z.tolist() == [4.0] * 3


def test_an_operator_whose_error_is_swallowed_is_found():
    watch = Capture().watch()
    with watch:
        with contextlib.suppress(RuntimeError):
            torch.ones(2).view(3)
        torch.ones(2) + 1
    trace = watch.finish(None)
    assert trace.failed.operator == "aten.view.default"
    assert trace.failed.line.text == "torch.ones(2).view(3)"


def test_an_operator_after_which_the_capture_is_lost():
    answers = iter([True, True, True, False])
    watch = OperatorWatch(lambda: next(answers, False), lambda: True, "cpu")
    x = torch.ones(2)
    with watch:
        x = x + 1
        x = x * 2
        x = x - 1
    assert watch.finish(None).failed.operator == "aten.mul.Tensor"


def test_a_call_after_the_last_operator():
    capture = Capture()
    watch = capture.watch()
    with watch:
        torch.ones(2)
        capture.valid = False
    trace = watch.finish(None)
    assert trace.between[0].operator.startswith("aten.ones")
    assert trace.between[1] is None


def test_operators_on_another_stream_are_noted_once_a_line():
    capture, x = Capture(), torch.ones(2)
    watch = capture.watch()
    with watch:
        x = x + 1
        capture.captured = False
        for _ in range(3):
            x = x * 2
        capture.captured = True
    trace = watch.finish(None)
    assert [call.operator for call in trace.outside] == ["aten.mul.Tensor"]
    assert trace.failed is trace.between is None


@pytest.mark.parametrize("strict", [True, False])
def test_work_outside_of_the_capture_is_explained(strict, backend):
    backend.traced = Trace(outside=[Call("aten.mul.Tensor", HERE)])
    calls = []

    def step(batch):
        calls.append(1)
        return batch.tokens + len(calls)  # so that a replay differs

    error = AuditError if strict else VerificationError
    match = r"on a stream that is not captured ran aten\.mul\.Tensor at model\.py:12 in forward"
    with pytest.raises(error, match=match):
        runner_of(step).capture([2], audit="strict" if strict else "report")


def test_an_unwatchable_step_does_not_hide_a_difference(backend, monkeypatch):
    def fail(step, batch):
        raise RuntimeError("no second capture")

    monkeypatch.setattr(backend, "trace", fail)
    calls = []

    def step(batch):
        calls.append(1)
        return batch.tokens + len(calls)  # so that a replay differs

    with pytest.raises(VerificationError, match="batch size 2"):
        runner_of(step).capture([2])


def test_a_strict_audit_needs_to_watch_the_step(backend):
    backend.traced = Trace(error=RuntimeError("no dispatch modes here"))
    with pytest.raises(AuditError, match="the step could not be watched: no dispatch modes here"):
        runner_of(ToyStep()).capture([2], audit="strict")
    runner_of(ToyStep()).capture([2])


class FakeLog:
    """The driver's log functions over a text."""

    def __init__(self, text=b"", status=0):
        self.text, self.status = text, status

    def cuLogsCurrent(self, position, flags):
        position._obj.value = len(self.text)
        return self.status

    def cuLogsDumpToMemory(self, position, buffer, size, flags):
        new = self.text[position._obj.value :][: size._obj.value - 1]
        ctypes.memmove(buffer, new + b"\0", len(new) + 1)
        size._obj.value = len(new)
        return self.status


def test_the_drivers_log_since_a_mark():
    library = FakeLog(b"[22:21:32.099][25642][CUDA][E] old\n")
    log = DriverLog(library)
    assert log.since_mark() == ()
    log.mark()
    assert log.since_mark() == ()
    for text in (b"[E] new [one]", b"[E] Returning 900 from cuMemAlloc_v2", b"[E] new [one]"):
        library.text += b"[22:21:33.000][25642][CUDA]" + text + b"\n"
    assert log.since_mark() == ("new [one]", "Returning 900 from cuMemAlloc_v2")
    assert log.since_mark() == ("new [one]", "Returning 900 from cuMemAlloc_v2")
    log.mark()
    assert log.since_mark() == ()


@pytest.mark.parametrize("library", [FakeLog(b"x\n", status=1), object()])
def test_drivers_without_a_log(library):
    log = DriverLog(library)
    log.mark()
    assert log.since_mark() == ()
