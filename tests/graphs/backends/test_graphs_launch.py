"""When a graph is launched by the driver's own call, and when torch replays it."""

import pytest
import torch
from graphs_toys import SPECS

from ostinato.graphs import GraphRunner, StaticBuffers, _native
from ostinato.graphs.backends.launch import Launch

EXECUTABLE, STREAM = 0x7F00_1234_5678, 0x7F00_8765_4321  # more than 32 bits


class FakeDriver:
    """A machine with one GPU or more, a graph of torch's, and what was launched by whom."""

    def __init__(self, draws=0):
        self.launched = []
        self.status = 0
        self.devices, self.device, self.stream = 1, 0, STREAM
        self.offset, self._draws = 100, draws

    def launch_graph(self, executable, stream):
        if not self.status:
            self.launched.append(("driver", executable, stream))
        return self.status

    def get_offset(self):
        return self.offset

    def raw_cuda_graph_exec(self):
        return EXECUTABLE

    def replay(self):
        if self.status:
            raise RuntimeError("CUDA error: as torch says it")
        self.offset += self._draws
        self.launched.append("torch")


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes the launch of a fake driver's graph."""

    def launch_of(driver):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: driver.devices)
        monkeypatch.setattr(torch.cuda, "default_generators", [driver] * 2)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: driver.device, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: driver.stream, raising=False
        )
        monkeypatch.setattr(_native, "launch_graph", driver.launch_graph)
        return Launch(driver, torch.device("cuda", 0))

    return launch_of


def test_torch_replays_once_then_the_driver_launches(make):
    driver = FakeDriver()
    launch = make(driver)
    for _ in range(3):
        launch()
    driver.stream = 0  # the default one
    launch()
    by_driver = [("driver", EXECUTABLE, STREAM)] * 2 + [("driver", EXECUTABLE, 0)]
    assert driver.launched == ["torch", *by_driver]


def test_a_graph_that_draws_random_numbers_stays_with_torch(make):
    driver = FakeDriver(draws=4)
    launch = make(driver)
    for _ in range(3):
        launch()
    assert driver.launched == ["torch"] * 3


def test_random_numbers_of_another_thread_put_the_decision_off(make):
    driver = FakeDriver(draws=4)
    launch = make(driver)
    launch()
    driver._draws = 0
    launch()
    launch()
    assert driver.launched == ["torch", "torch", ("driver", EXECUTABLE, STREAM)]


def test_on_another_device_than_the_current_one_torch_replays(make):
    driver = FakeDriver()
    driver.devices = 2
    launch = make(driver)
    launch()
    driver.device = 1
    launch()
    driver.device = 0
    launch()
    assert driver.launched == ["torch", "torch", ("driver", EXECUTABLE, STREAM)]


def test_what_the_driver_refuses_is_said_by_torch(make):
    driver = FakeDriver()
    launch = make(driver)
    launch()
    driver.status = 700
    with pytest.raises(RuntimeError, match="as torch says it"):
        launch()
    assert driver.launched == ["torch"]


def test_a_torch_that_does_not_tell_the_executable_replays(make, monkeypatch):
    monkeypatch.delattr(FakeDriver, "raw_cuda_graph_exec")
    driver = FakeDriver()
    launch = make(driver)
    launch()
    launch()
    assert driver.launched == ["torch"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_a_graph_is_refused():
    with pytest.raises(RuntimeError, match=r"libcuda\.so\.1 with cuGraphLaunch: got none"):
        _native.launch_graph(EXECUTABLE, STREAM)


@pytest.mark.gpu
def test_random_numbers_move_on_from_run_to_run():
    def step(batch):
        return torch.rand(batch.size, device="cuda")

    inputs = {"tokens": [1, 2], "hidden": [[1.0, 2.0, 3.0]] * 2}
    with GraphRunner(step, StaticBuffers(SPECS, 2, "cuda")) as runner:
        runner.capture([2], verify=False)
        runs = []
        for _ in range(2):
            torch.cuda.manual_seed(7)
            runs.append([runner.run(2, inputs).tolist() for _ in range(4)])
        assert runs[0] == runs[1]
        assert len({tuple(run) for run in runs[0]}) == 4


@pytest.mark.gpu
def test_every_stream_gets_its_runs():
    buffers = StaticBuffers(SPECS, 2, "cuda")
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    with GraphRunner(lambda batch: batch.tokens + 1, buffers) as runner:
        runner.capture([2])
        for index in range(12):
            with torch.cuda.stream(streams[index % 3]):
                torch.cuda._sleep(1_000_000)
                got = runner.run(2, {"tokens": [index, 0], "hidden": torch.zeros(2, 3)}).clone()
            streams[index % 3].synchronize()
            assert got.tolist() == [index + 1, 1]
