"""The order of runs among streams, as far as it shows without a GPU."""

import pytest
import torch
from graphs_toys import SPECS, toy_inputs

from ostinato.graphs import BufferSpec, BurstRules, Feed, GraphRunner, Misses, StaticBuffers
from ostinato.graphs.backends.streams import CallerOrder
from ostinato.graphs.guards import RunLock


class FakeStream:
    """A stream of another library, which waits for events of its kind."""

    stream_id = 4096  # an address

    def __init__(self, handle: int = 1) -> None:
        self.handle = handle
        self.waited: list[object] = []

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def wait_stream(self, stream: object) -> None:
        self.waited.append(stream)


def test_a_new_stream_with_the_handle_of_one_that_is_gone_waits(monkeypatch):
    run_lock = RunLock()
    order = CallerOrder(torch.device("cuda", 0), run_lock)
    current = FakeStream()
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: current.handle, raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    assert order.follow()
    order.passed()
    event = run_lock.last_event
    current = FakeStream()
    assert order.follow()
    assert current.waited == [event]


@pytest.fixture
def passed(monkeypatch):
    """Count how often a foreign stream's call has passed, of runners made on the CPU."""
    calls = []
    backend = "ostinato.graphs.backends.cpu.CpuBackend"
    monkeypatch.setattr(f"{backend}.follow", lambda self: True)
    monkeypatch.setattr(f"{backend}.passed", lambda self: calls.append(1))
    return calls


@pytest.mark.parametrize("misses", [None, Misses("eager"), Misses("capture")])
def test_a_refused_run_is_marked_on_a_foreign_stream(misses, step, passed):
    runner = GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([4] if misses is None else [1], misses=misses)
    with pytest.raises(TypeError, match="tokens"):
        runner.run(3, toy_inputs(3) | {"tokens": torch.zeros(3)})
    assert passed == [1]


def test_a_failed_burst_is_marked_on_a_foreign_stream(passed, monkeypatch):
    def fail(self):
        raise RuntimeError("out of resources")

    specs, rules = {"x": BufferSpec((), torch.int64, 0)}, BurstRules({"x": Feed(None)}, None)
    buffers = StaticBuffers(specs, 2, "cpu")
    runner = GraphRunner(lambda batch: batch.x + 1, buffers, burst=rules)
    runner.capture([2])
    monkeypatch.setattr("ostinato.graphs.loop.cpu.CpuLoop.launch", fail)
    with pytest.raises(RuntimeError, match="out of resources"):
        runner.burst(2, {"x": [1, 2]}, 2)
    assert passed == [1]
    runner.run(2, {"x": [1, 2]})
