"""Fixtures of the kernel tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels_probe import build_recorder, fake_nvcc

from ostinato.kernels import loader, toolchain


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


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_loaded", {})
    loader._mode.cache_clear()
    for name in ("OSTINATO_JIT", "OSTINATO_DEBUG_PRINT", "OSTINATO_DELAY_SITE"):
        monkeypatch.delenv(name, raising=False)
