"""The grouped GEMM's sources on the CPU, under random schedules."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels_emulation import compile_cases, emulated_sources

from effort import effort
from ostinato.ops.moe.moe_linear_cuda import MoeLinear

pytestmark = pytest.mark.nvcc

_CASES = effort(6, 40)


def _variant(dtype: str, out_dtype: str, tokens: int, *, blocks: int = 0) -> MoeLinear:
    """Return a kernel; `blocks` is how many channels share a scale of a block."""
    return MoeLinear(
        dtype=dtype,
        out_dtype=out_dtype,
        tokens=tokens,
        block_scales=blocks > 0,
        scale_channels=blocks or 8,
    )


_FEW = _variant("int8", "bf16", 8)
_BLOCKS = _variant("e4m3", "fp32", 64, blocks=128)
_PAIRS = _variant("e4m3", "bf16", 128)
# Channels as rows of the MMA and tokens as rows, one warpgroup and two, pieces of a stage.
_VARIANTS = (
    _FEW,
    _BLOCKS,
    _PAIRS,
    _variant("e4m3", "fp32", 16, blocks=128),
    _variant("e4m3", "fp32", 32, blocks=8),
    _variant("e4m3", "fp32", 64, blocks=8),
    _variant("e4m3", "fp32", 128, blocks=8),
    _variant("e4m3", "fp32", 128, blocks=128),
    _variant("fp16", "fp16", 32),
    _variant("bf16", "fp32", 64),
    _variant("int8", "fp32", 128),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_sources(tmp_path_factory.mktemp("emulated") / "csrc")


@functools.cache
def _program(sources: Path, variant: MoeLinear) -> Path:
    """Compile the random calls of a kernel, once for all tests."""
    program = sources / variant.name
    defines = {**variant.defines(), "OSTINATO_ABI": "0"}
    compile_cases(sources, "moe_linear_cases.cpp", program, defines)
    return program


def _run(
    sources: Path, variant: MoeLinear, cases: int = _CASES
) -> subprocess.CompletedProcess[str]:
    command = [_program(sources, variant), "0", str(cases)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    "variant", effort(_VARIANTS[1:3], _VARIANTS), ids=lambda variant: variant.name
)
def test_every_schedule_gives_the_right_rows(sources: Path, variant: MoeLinear) -> None:
    """With NaN behind rows of x, absurd entries behind the last tile, and guarded outputs.

    Pairs of CTAs give the bits of single ones.
    """
    done = _run(sources, variant)
    assert done.returncode == 0, done.stdout[-3000:]


_WAITS = [
    ("producer.cuh", "arrive_expecting(", "wait(&storage_.empty[position.slot]"),
    ("producer.cuh", "copy_rows(warp, lane", "wait(&storage_.empty[position.slot]"),
    ("stages.cuh", "fence_shared_for_tma", "wait(&storage_.full["),
    ("stages.cuh", "fence_shared_for_tma", "wait(&storage_.full_tokens["),
]


@pytest.mark.parametrize(("file", "before", "call"), effort(_WAITS[3:], _WAITS))
def test_a_missing_wait_is_found(
    sources: Path, tmp_path: Path, file: str, before: str, call: str
) -> None:
    sources = shutil.copytree(sources, tmp_path / "csrc")
    path = sources / "gemm_w8a8" / "moe" / file
    text = path.read_text()
    begin = text.rindex(call, 0, text.index(before))
    path.write_text(text[:begin] + text[text.index(";", begin) + 1 :])
    assert _run(sources, _FEW).returncode != 0


def test_a_pair_that_overwrites_what_one_still_reads_is_found(
    sources: Path, tmp_path: Path
) -> None:
    """Each CTA's stages are free when both have read them."""
    sources = shutil.copytree(sources, tmp_path / "csrc")
    path = sources / "gemm_w8a8" / "moe" / "stages.cuh"
    text = path.read_text()
    other = "remote_address(empty_, threadIdx.x % 2)"
    assert other in text
    path.write_text(text.replace(other, "remote_address(empty_, cluster_rank())"))
    assert _run(sources, _PAIRS, 24).returncode != 0
