"""Fixtures of the kernel tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jit_probe import LateWriter, build_recorder, fake_nvcc

from ostinato.jit import loader, toolchain
from ostinato.jit.compiler import build, plan
from ostinato.jit.targets import DEFAULT


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty kernel cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OSTINATO_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a library without a kernel that takes `PaddedQuantizeParams`."""
    return build_recorder(tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def nvcc_calls(
    tmp_path: Path, cache: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Put a stand-in for nvcc first, with an empty cache; give the list of its calls."""
    home = tmp_path / "cuda"
    monkeypatch.setenv("CUDA_HOME", str(home))
    return fake_nvcc(home, recorder)


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every nvcc of this machine."""
    monkeypatch.setattr(toolchain, "_nvcc_path", lambda: None)


@pytest.fixture(scope="module")
def write_late() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Give a function that copies the second to the first, long after its successor has started."""
    (entry,) = build([plan(LateWriter())])
    library = ctypes.CDLL(str(entry.library))

    def run(to: torch.Tensor, source: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        addresses = [ctypes.c_void_p(x) for x in (to.data_ptr(), source.data_ptr(), stream)]
        error = library.ostinato_write_late(*addresses[:2], to.numel(), addresses[2])
        assert error == 0

    return run


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_loaded", {})
    if not torch.cuda.is_available():  # nor is there a driver to ask
        monkeypatch.setattr(loader, "target_for", lambda device: DEFAULT)
    loader._mode.cache_clear()
    for name in ("OSTINATO_JIT", "OSTINATO_DEBUG_PRINT", "OSTINATO_DELAY_SITE"):
        monkeypatch.delenv(name, raising=False)
