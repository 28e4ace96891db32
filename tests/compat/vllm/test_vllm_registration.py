"""What `register` changes in vLLM, and what it leaves."""

from __future__ import annotations

import logging
from importlib import metadata

import pytest
import torch
from vllm import envs, ir
from vllm.config.utils import hash_factors
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.platforms import PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ostinato.compat import vllm as plugin
from ostinato.compat.vllm import compile_cache, version
from ostinato.compat.vllm.attention_backend import OstinatoAttentionBackend
from ostinato.compat.vllm.dense import OstinatoConfig

TABLES = (
    linear._POSSIBLE_INT8_KERNELS,
    linear._POSSIBLE_FP8_KERNELS,
    linear._POSSIBLE_FP8_BLOCK_KERNELS,
)


def names(table: dict[PlatformEnum, list[type]]) -> list[str]:
    return [kernel.__name__ for kernel in table[PlatformEnum.CUDA]]


def test_vllm_finds_the_entry_point() -> None:
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="ostinato")
    assert found.load() is plugin.register


def test_registering_twice_changes_nothing() -> None:
    plugin.register()
    before = [names(table) for table in TABLES], list(QUANTIZATION_METHODS)
    plugin.register()
    assert ([names(table) for table in TABLES], list(QUANTIZATION_METHODS)) == before
    for table in TABLES:
        ours = [name for name in names(table) if name.startswith("Ostinato")]
        assert ours == names(table)[:1]


def test_registering_does_not_initialise_cuda() -> None:
    plugin.register()
    assert not torch.cuda.is_initialized()


def test_names_lead_to_our_classes() -> None:
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is OstinatoAttentionBackend
    assert get_quantization_config("ostinato") is OstinatoConfig
    assert "ostinato" in ir.ops.rms_norm.impls
    assert "ostinato" in ir.ops.fused_add_rms_norm.impls


def test_models_compiled_without_the_plugin_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    ours = hash_factors(envs.compile_factors())
    assert hash_factors(envs.compile_factors()) == ours
    monkeypatch.delitem(envs.environment_variables, compile_cache.FACTOR)
    assert hash_factors(envs.compile_factors()) != ours


def test_one_line_names_the_versions(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    with caplog.at_level("INFO", logger="vllm"):
        assert version.check_version("0.33.1+cu130")
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "vLLM 0.33.1+cu130 found" in record.getMessage()


def test_another_version_is_refused_with_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "found_version", lambda: "0.34.0")
    before = [table.pop(PlatformEnum.CUDA) for table in TABLES]
    logging.getLogger("vllm").propagate = True
    try:
        with caplog.at_level("INFO", logger="vllm"):
            plugin.register()  # touches none of the lists, which are missing
    finally:
        for table, kernels in zip(TABLES, before, strict=True):
            table[PlatformEnum.CUDA] = kernels
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "nothing is registered, vLLM 0.34.0 found, expected 0.33" in record.getMessage()
