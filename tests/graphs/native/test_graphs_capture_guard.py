"""A capture is ended whatever is raised in it: with a driver and a graph that only take notes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ostinato.graphs import _native

_DRIVER = """
static int capturing, fails, host;
static void* graph = &graph;
int cuStreamBeginCapture_v2(void* stream, int mode) {
  if (fails || capturing || mode != 1) { return 900; }
  capturing = 1; return 0;
}
int cuStreamEndCapture(void* stream, void** out) {
  *out = capturing ? graph : 0; capturing = 0; return 0;
}
int cuGraphDestroy(void* destroyed) { return destroyed != graph; }
int cuLaunchHostFunc(void* stream, void (*f)(void*), void* x) { host += capturing; return 0; }
void begin(void) { capturing = 1; }
int end(void) { int was = capturing; capturing = 0; return was; }
void fail(int error) { fails = error; }
int is_capturing(void) { return capturing; }
int hosts(void) { return host; }
"""
_PREPARE = """
import ctypes, importlib.util, signal, sys
cuda = ctypes.CDLL({library!r}, ctypes.RTLD_GLOBAL)
spec = importlib.util.spec_from_file_location("ostinato.graphs._native", {native!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
CaptureGuard = native.CaptureGuard

class Graph:
    def __init__(self): self.calls, self.fails = [], False
    def begin(self):
        self.calls.append("begin")
        if self.fails: raise RuntimeError("no capture")
        cuda.begin()
    def end(self):
        self.calls.append("end")
        if cuda.end() == 0 or self.fails:
            self.fails = False
            cuda.fail(0)
            raise RuntimeError("bad capture")

def guard(graph, keep=True, note=lambda: None):
    return CaptureGuard(
        7, select=lambda: graph.calls.append("select"), begin=graph.begin, end=graph.end,
        reset=lambda: graph.calls.append("reset"), note=note, keep=keep)

graph = Graph()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(_DRIVER)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(command, check=True)
    return library


def run(library: Path, code: str) -> list[str]:
    """Run code in a process that has loaded the driver as CUDA's; return the lines it printed.

    It loads the extension alone: the package would import torch, for seconds.
    """
    prepare = _PREPARE.format(library=str(library), native=_native.__file__)
    whole = prepare + textwrap.dedent(code)
    said = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()


def test_a_capture_that_succeeds_is_kept(library: Path) -> None:
    code = """
        with guard(graph): print(cuda.is_capturing())
        print(*graph.calls, cuda.is_capturing())
    """
    assert run(library, code) == ["1", "begin end 0"]


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt", "SystemExit"])
def test_one_that_raises_is_abandoned(library: Path, error: str) -> None:
    code = f"""
        try:
            with guard(graph, note=lambda: graph.calls.append("note")): raise {error}
        except {error}: pass
        print(*graph.calls, cuda.is_capturing(), cuda.hosts())
    """
    assert run(library, code) == ["begin note select end reset 0 1"]


def test_one_that_ends_badly_is_abandoned(library: Path) -> None:
    code = """
        try:
            with guard(graph): cuda.end()  # as the driver does with one that is invalid
        except RuntimeError as error: print(error)
        print(*graph.calls, cuda.is_capturing())
    """
    assert run(library, code) == ["bad capture", "begin end select end reset 0"]


def test_one_that_is_not_to_be_kept_is_abandoned(library: Path) -> None:
    code = """
        with guard(graph, keep=False): pass
        print(*graph.calls)
    """
    assert run(library, code) == ["begin select end reset"]


def test_one_that_did_not_begin_touches_no_stream(library: Path) -> None:
    """It may be somebody else's capture. The graph lives on: torch may call it."""
    code = """
        graph.fails = True
        cuda.begin()
        before = sys.getrefcount(graph)
        try:
            with guard(graph): print("never")
        except RuntimeError as error: print(error)
        print(*graph.calls, cuda.is_capturing(), sys.getrefcount(graph) > before)
    """
    assert run(library, code) == ["no capture", "begin 1 True"]


def test_a_note_that_is_interrupted_abandons_too(library: Path) -> None:
    code = """
        def note(): raise KeyboardInterrupt
        try:
            with guard(graph, note=note): raise ValueError
        except KeyboardInterrupt as error: print(type(error.__context__).__name__)
        print(*graph.calls, cuda.is_capturing())
    """
    assert run(library, code) == ["ValueError", "begin select end reset 0"]


def test_a_stream_that_stays_unusable_is_said(library: Path) -> None:
    code = """
        try:
            with guard(graph):
                cuda.fail(1)
                raise ValueError
        except RuntimeError as error: print(error)
        print(cuda.is_capturing())
    """
    assert run(library, code) == [
        "the stream is unusable after a failed capture: CUresult 900",
        "0",
    ]


def test_signals_at_any_moment_leave_no_capture(library: Path) -> None:
    """Of a graph whose functions have no frame of Python, as torch's."""
    code = """
        import functools, random, time
        heard = 0
        def interrupt(*_): raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        quiet = functools.partial(CaptureGuard, 7, select=cuda.hosts, begin=cuda.begin,
                                  end=cuda.end, reset=cuda.hosts, note=cuda.hosts)
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-4))
                while True:
                    with quiet(keep=random.random() < 0.7):
                        assert cuda.is_capturing()
            except KeyboardInterrupt:
                heard += 1
            assert not cuda.is_capturing()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(heard > 100)
    """
    assert run(library, code) == ["True"]
