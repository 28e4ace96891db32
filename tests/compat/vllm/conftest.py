"""vLLM's real Python classes on the CPU, without its binaries: `make test-vllm` brings them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

# By its metadata: this folder, too, looks like a package of that name.
HAS_VLLM = any(metadata.distributions(name="vllm"))
collect_ignore_glob = [] if HAS_VLLM else ["test_vllm_*.py"]


@pytest.fixture(scope="session")
def _parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process is all of vLLM's parallel groups."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    meeting: Path = tmp_path_factory.mktemp("group") / "file"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture
def hopper(_parallel: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's current platform says that it is an H100, as far as kernels are asked."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    from ostinato.compat.vllm import register

    register()
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(9, 0)
    )
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        yield


@pytest.fixture
def on_cuda(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses kernels out of its lists for CUDA, for a model in bf16."""
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.platforms import PlatformEnum, current_platform

    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    model = SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr(get_current_vllm_config(), "model_config", model)
