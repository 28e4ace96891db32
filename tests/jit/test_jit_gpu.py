"""Compiled kernels on a GPU: launches, streams, captures, and the workshop's build modes."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from jit_probe import HERE, Probe

from ostinato import _C
from ostinato.jit import loader
from ostinato.jit.compiler import build, plan
from ostinato.jit.errors import MissingKernelError
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.linear.quantize_cuda import Quantize

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_SIZE = 100_003


def _probe(mode: BuildMode = RELEASE) -> _C.Library:
    (entry,) = build([plan(Probe(), mode)])
    library = _C.Library(str(entry.library))
    library.prepare()
    return library


def _copy(library: _C.Library, x: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    library.launch(
        x=x.data_ptr(),
        x_stride=x.numel(),
        out=out.data_ptr(),
        out_stride=out.numel(),
        m=1,
        k=x.numel(),
        stream=torch.cuda.current_stream().cuda_stream,
        pdl=pdl,
    )


def _random(size: int = _SIZE) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("pdl", [False, True])
def test_a_launch_on_any_stream(pdl: bool) -> None:
    library, x = _probe(), _random()
    out = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _copy(library, x, out, pdl=pdl)
    side.synchronize()
    assert torch.equal(out, x)


@pytest.mark.parametrize("pdl", [False, True])
def test_200_chained_launches_replay_with_changed_inputs(pdl: bool) -> None:
    library, buffers = _probe(), [_random() for _ in range(201)]
    graph = torch.cuda.CUDAGraph()
    stop = threading.Event()
    failures: list[Exception] = []

    def allocate() -> None:
        try:
            while not stop.is_set():
                torch.empty(1 << 20, device="cuda").fill_(1.0)
                torch.cuda.empty_cache()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for source, target in pairwise(buffers):
                _copy(library, source, target, pdl=pdl)
    finally:
        stop.set()
        thread.join()
    assert not failures
    for _ in range(3):
        buffers[0].copy_(_random())
        buffers[-1].zero_()
        graph.replay()
        assert torch.equal(buffers[-1], buffers[0])


def test_nothing_is_compiled_inside_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    variant = Quantize(kind="per_token", in_dtype="bf16", out_dtype="int8")
    legacy, graph = 0, torch.cuda.CUDAGraph()
    assert not _C.is_capturing(legacy)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        stream = torch.cuda.current_stream().cuda_stream
        assert _C.is_capturing(stream)
        torch.zeros(1, device="cuda")
        with pytest.raises(MissingKernelError, match="being captured"):
            loader.load(variant, device=0, stream=stream)
    assert not _C.is_capturing(stream)
    assert not list(tmp_path.iterdir())
    graph.replay()


def test_a_refused_launch_is_raised_and_does_no_harm() -> None:
    library, x = _probe(), _random()
    with pytest.raises(RuntimeError, match=r"CUDA error in launch of .*invalid argument"):
        _copy(library, x[:0], x[:0])
    out = torch.zeros_like(x)
    _copy(library, x, out)
    assert torch.equal(out, x)


@pytest.mark.parametrize("site", ["probe_store", "probe_load"])
def test_injected_delays_change_no_bit(site: str) -> None:
    library, x = _probe(BuildMode(delay_site=site)), _random()
    for _ in range(5):
        out = torch.zeros_like(x)
        _copy(library, x, out)
        assert torch.equal(out, x)


def test_the_debug_build_prints_from_the_producer() -> None:
    code = (
        "import torch, test_jit_gpu as t\n"
        "from ostinato.jit.mode import BuildMode\n"
        "x = t._random()\n"
        "t._copy(t._probe(BuildMode(debug_print=True)), x, torch.zeros_like(x))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"probe: {_SIZE} bytes" in done.stdout
