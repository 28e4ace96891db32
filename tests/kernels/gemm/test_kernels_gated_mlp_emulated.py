"""Layers that quantise one token themselves on the CPU, under random schedules: equal bits."""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from kernels_emulation import compile_cases, emulated_sources

from effort import effort
from ostinato.jit.variant import Variant
from ostinato.ops.linear.fused_cuda import ActivatedLinear, FusedLinear

pytestmark = pytest.mark.nvcc

_CASES = effort(60, 250)


def _first(
    kind: str, dtype: str, activation: str, weight: str = "", max_k: int = 4096
) -> FusedLinear:
    return FusedLinear(
        kind=kind,
        in_dtype=dtype,
        out_dtype=dtype,
        max_k=max_k,
        weight_dtype=weight,
        activation=activation,
    )


_GATED = (
    _first("rms_norm", "bf16", "silu_mul"),
    _first("rms_norm", "bf16", "gelu_tanh_mul", "fp32", 8192),
    _first("per_token", "fp16", "relu2_mul"),
)
_PLAIN = (_first("per_token", "bf16", "", max_k=8192), _first("per_token", "fp16", ""))
_SECOND = tuple(ActivatedLinear(out_dtype=dtype) for dtype in ("bf16", "fp32", "fp16"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_sources(tmp_path_factory.mktemp("emulated") / "csrc")


@functools.cache
def _program(sources: Path, variant: Variant) -> Path:
    program = sources / variant.name
    defines = {**variant.defines(), "OSTINATO_ABI": "0"}
    compile_cases(sources, f"{variant.family}_cases.cpp", program, defines)
    return program


def _run(program: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [program, "0", str(_CASES), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("gated", effort(_GATED[:1], _GATED), ids=lambda variant: variant.name)
def test_gates_are_those_that_the_plain_layer_stores(
    sources: Path, tmp_path: Path, gated: FusedLinear
) -> None:
    plain = replace(gated, activation="")
    for variant in (plain, gated):
        done = _run(_program(sources, variant), tmp_path)
        assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("plain", effort(_PLAIN[:1], _PLAIN), ids=lambda variant: variant.name)
def test_rows_in_shared_memory_are_those_of_two_kernels(
    sources: Path, tmp_path: Path, plain: FusedLinear
) -> None:
    """Rows of one chunk and of several, which the slots hold or do not."""
    done = _run(_program(sources, plain), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("second", effort(_SECOND[:1], _SECOND), ids=lambda variant: variant.name)
def test_codes_made_on_the_way_are_those_of_the_row(sources: Path, second: ActivatedLinear) -> None:
    """Rows of zeros, subnormal and huge ones, with infinities and NaN among them."""
    done = _run(_program(sources, second))
    assert done.returncode == 0, done.stdout[-3000:]


_WAITS = [
    ("activated_consumer.cuh", "OSTINATO_DELAY(activated_linear_stage_load", "wait("),
    ("activated_consumer.cuh", "OSTINATO_DELAY(activated_linear_partial_load", "small_m::sync_"),
    ("activated_consumer.cuh", "// before the next tiles", "small_m::sync_"),
]


@pytest.mark.parametrize(("file", "before", "call"), effort(_WAITS[:1], _WAITS))
def test_a_missing_wait_is_found(
    sources: Path, tmp_path: Path, file: str, before: str, call: str
) -> None:
    sources = shutil.copytree(sources, tmp_path / "csrc")
    path = sources / "gemm_w8a8" / "fused" / file
    text = path.read_text()
    begin = text.rindex(call, 0, text.index(before))
    path.write_text(text[:begin] + text[text.index(";", begin) + 1 :])
    assert _run(_program(sources, _SECOND[0])).returncode != 0
