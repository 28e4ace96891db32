"""How a burst is put together for the device: the plan's words, the graph, the compiled kernel."""

import re
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from graphs_counting import COLUMNS, PAGE_SIZE, RULES, SPECS, CountingStep

from forks import in_a_fork
from ostinato.graphs import BurstError, StaticBuffers
from ostinato.graphs.loop import cuda as module
from ostinato.graphs.loop.memory import BurstMemory
from ostinato.graphs.loop.plan import encode
from ostinato.graphs.outputs import Outputs
from ostinato.jit.toolchain import find_nvcc

CPU = torch.device("cpu")
HEAD, RULE = 6, 12  # words of `Plan` before its rules, and of `Rule`


def words_of(struct: str) -> int:
    """Count the words of a struct in the kernel's source."""
    source = module._SOURCE.read_text()
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", source, re.DOTALL).group(1)
    return len(re.findall(r"^  (?:volatile )?Word \w+;", body, re.MULTILINE))


def test_the_plan_has_the_layout_that_the_kernel_reads():
    assert words_of("Rule") == RULE
    assert words_of("Plan") == HEAD
    buffers, memory = StaticBuffers(SPECS, 4, CPU), BurstMemory(RULES, 4, CPU)
    batch = buffers.view(2)
    outputs = Outputs.of(CountingStep(CPU)(batch), batch)
    plan = encode(RULES, SPECS, batch, outputs, memory).tolist()
    tokens, mixed = outputs.tensors
    assert plan[:HEAD] == [len(SPECS), tokens.data_ptr(), 8, 8, 4, 3]
    rules = dict(
        zip(SPECS, (plan[i : i + RULE] for i in range(HEAD, len(plan), RULE)), strict=True)
    )
    half = torch.tensor(0.5).view(torch.int32).item()
    assert rules == {
        "tokens": [1, batch.tokens.data_ptr(), 8, 1, 0, tokens.data_ptr(), 8, 0, 0, 0, 0, 0],
        "positions": [2, batch.positions.data_ptr(), 4, 1, 0, 1, 0, 0, 0, 0, 0, 0],
        "slots": [
            *(3, batch.slots.data_ptr(), 8, 1, -1, batch.pages.data_ptr(), COLUMNS, 4, 0),
            *(PAGE_SIZE, batch.positions.data_ptr(), 4),
        ],
        "pages": [0, batch.pages.data_ptr(), 4, COLUMNS, 0, 0, 0, 0, 0, 0, 0, 0],
        "mixed": [1, batch.mixed.data_ptr(), 4, 2, half, mixed.data_ptr(), 8, 0, 0, 0, 0, 0],
        "scale": [
            *(0, batch.scale.data_ptr(), 4, 1, torch.tensor(1.0).view(torch.int32).item()),
            *([0] * 7),
        ],
    }


class Driver:
    """Stands for cuda.bindings' driver: notes what is asked for, and may refuse one of it."""

    CU_GRAPH_COND_ASSIGN_DEFAULT = 1
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL=13)
    CUgraphConditionalNodeType = SimpleNamespace(CU_GRAPH_COND_TYPE_WHILE=1)
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def __init__(self, refused: str = "") -> None:
        self.calls: list[tuple[str, tuple]] = []
        self.refused = refused

    def CUgraphNodeParams(self):
        return SimpleNamespace(type=0, conditional=SimpleNamespace(phGraph_out=["body"]))

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            if name == self.refused:
                return (7,)
            results = {"cuGraphConditionalHandleCreate": (99,), "cuGraphAddChildGraphNode": ("c",)}
            return 0, *results.get(name, (name,))

        return call


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    stream = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(module, "_import", lambda name: driver)
    monkeypatch.setattr(module, "_advance_kernel", lambda device: "kernel")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    event = SimpleNamespace(
        record=lambda stream: None, query=lambda: True, synchronize=lambda: None
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    driver.event = event
    return driver


def loop_of(memory):
    return module.WhileLoop(1234, torch.zeros(4), memory, torch.device("cuda", 0))


def test_a_while_node_holds_the_step_and_then_the_kernel(driver):
    loop = loop_of(BurstMemory(RULES, 2, CPU))
    calls = dict(driver.calls)
    assert calls["cuGraphAddChildGraphNode"] == ("body", None, 0, 1234)
    body, dependencies, count, launch = calls["cuGraphAddKernelNode"]
    assert (body, dependencies, count, launch.func) == ("body", ["c"], 1, "kernel")
    node = calls["cuGraphAddNode"][4].conditional
    assert (node.handle, node.type, node.size) == (99, 1, 1)
    loop.launch()
    assert driver.calls[-1] == ("cuGraphLaunch", ("cuGraphInstantiate", 5))
    loop.release()
    assert [name for name, _ in driver.calls[-2:]] == ["cuGraphExecDestroy", "cuGraphDestroy"]


def test_a_loop_that_is_dropped_gives_its_graphs_back_once(driver):
    destroyed = ["cuGraphExecDestroy", "cuGraphDestroy"]
    loop = loop_of(BurstMemory(RULES, 2, CPU))
    del loop
    assert [name for name, _ in driver.calls[-2:]] == destroyed
    loop = loop_of(BurstMemory(RULES, 2, CPU))
    loop.release()
    loop.release()
    del loop
    assert [name for name, _ in driver.calls if "Destroy" in name] == 2 * destroyed
    loop = loop_of(BurstMemory(RULES, 2, CPU))

    def leaves_it_alone():
        loop.release()
        assert [name for name, _ in driver.calls if "Destroy" in name] == 2 * destroyed

    assert in_a_fork(leaves_it_alone) == "nothing"


@pytest.mark.parametrize("refused", ["cuGraphAddNode", "cuGraphInstantiate", "cuGraphCreate"])
def test_what_the_driver_refuses_is_named_and_nothing_is_left(refused, driver):
    driver.refused = refused
    with pytest.raises(BurstError, match=f"{refused}: 7"):
        loop_of(BurstMemory(RULES, 2, CPU))
    destroyed = [name for name, _ in driver.calls].count("cuGraphDestroy")
    assert destroyed == (refused != "cuGraphCreate")


def test_waiting_ends_with_the_step_or_with_the_device(driver, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    memory = BurstMemory(RULES, 2, CPU)
    loop = loop_of(memory)
    memory.publish(0, [4, 5], done=False)
    loop.wait(0)
    with pytest.raises(BurstError, match="before it had reported its end"):
        loop.wait(1)

    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    driver.event.query = fail
    with pytest.raises(BurstError, match="failed on the device: an illegal memory access"):
        loop.wait(1)
    memory.publish(1, [6, 7], done=True)
    loop.wait(5)
    assert memory.tokens(1, 2) == [6, 7]


class Nvrtc:
    def __init__(self, status=0):
        self.status = status

    def nvrtcCreateProgram(self, source, name, *_):
        assert b"ostinato_advance" in source
        return 0, name

    def nvrtcCompileProgram(self, program, count, options):
        assert options == [b"--gpu-architecture=compute_90"]
        return (self.status,)

    def nvrtcGetProgramLogSize(self, program):
        return 0, 9

    def nvrtcGetProgramLog(self, program, log):
        log[:] = b"line 7: ?"
        return (0,)

    def nvrtcGetPTXSize(self, program):
        return 0, 4

    def nvrtcGetPTX(self, program, code):
        code[:] = b"ptx!"
        return (0,)

    def nvrtcDestroyProgram(self, program):
        return (0,)


@pytest.mark.parametrize("status", [0, 6])
def test_the_kernel_is_compiled_for_the_device_it_runs_on(status, monkeypatch):
    libraries = {"nvrtc": Nvrtc(status), "driver": Driver()}
    monkeypatch.setattr(module, "_import", libraries.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if status:
        with pytest.raises(BurstError, match=r"advance.cu could not be compiled: line 7: \?"):
            module._advance_kernel.__wrapped__(0)
        return
    assert module._advance_kernel.__wrapped__(0) == "cuModuleGetFunction"
    assert libraries["driver"].calls[0] == ("cuModuleLoadData", (b"ptx!",))


def test_without_cuda_python_the_remedy_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(BurstError, match="pip install"):
        module._import("nvrtc")


@pytest.mark.nvcc
def test_the_kernel_is_cuda(tmp_path):
    nvcc = find_nvcc()
    ptx = tmp_path / "advance.ptx"
    command = [nvcc.path, "--ptx", "-arch=compute_90", "-Werror", "all-warnings"]
    subprocess.run([*command, str(module._SOURCE), "-o", str(ptx)], check=True)
    assert "call" in ptx.read_text()
    assert "cudaGraphSetConditional" in ptx.read_text()
