"""The grouped GEMM's sources on the CPU, under random schedules."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels_emulation import compile_cases, emulated_sources

from effort import effort
from ostinato.ops.moe.moe_linear_cuda import MoeLinear

pytestmark = pytest.mark.nvcc

_CASES = effort(6, 16)


def _variant(
    dtype: str, out_dtype: str, tokens: int, *, blocks: int = 0, x_dtype: str = ""
) -> MoeLinear:
    """Return a kernel; `blocks` is how many channels share a scale of a block."""
    return MoeLinear(
        dtype=dtype,
        out_dtype=out_dtype,
        tokens=tokens,
        block_scales=blocks > 0,
        scale_channels=blocks or 8,
        x_dtype=x_dtype,
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
# Each quantises rows of x: whole ones, and by groups.
_ROWS = _variant("int8", "bf16", 8, x_dtype="bf16")
_GROUPS = _variant("e4m3", "bf16", 8, blocks=128, x_dtype="bf16")
_QUANTIZING = (
    _ROWS,
    _GROUPS,
    _variant("e4m3", "bf16", 8, x_dtype="bf16"),
    _variant("e4m3", "fp16", 8, blocks=8, x_dtype="fp16"),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_sources(tmp_path_factory.mktemp("emulated") / "csrc")


@functools.cache
def _program(sources: Path, variant: MoeLinear, rows: str) -> Path:
    """Compile the random calls of a kernel, once for all tests."""
    program = sources / f"{variant.name}{rows}"
    defines = {**variant.defines(), "OSTINATO_ABI": "0", **({"CASES_X": rows} if rows else {})}
    compile_cases(sources, "moe_linear_cases.cpp", program, defines)
    return program


def _run(
    sources: Path, variant: MoeLinear, rows: str = "", cases: int = _CASES
) -> subprocess.CompletedProcess[str]:
    """Run random calls; `rows` is the dtype of those that are quantised."""
    command = [_program(sources, variant, rows or variant.x_dtype), "0", str(cases)]
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


@pytest.mark.parametrize(
    "variant", effort(_QUANTIZING[1:2], _QUANTIZING), ids=lambda variant: variant.name
)
def test_quantising_rows_changes_no_bit(sources: Path, variant: MoeLinear) -> None:
    """As if they were quantised before: rows of zeros, tiny ones and rows with a NaN, too."""
    given = _run(sources, dataclasses.replace(variant, x_dtype=""), variant.x_dtype)
    done = _run(sources, variant)
    assert given.returncode == 0, given.stdout[-3000:]
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout == given.stdout
    assert done.stdout.count("bits") == _CASES


_QUANTIZER = "quantizing_producer.cuh"
_WAITS = [
    (_FEW, "producer.cuh", "load_weights(map", "wait(&storage_.empty[position.slot]"),
    (_FEW, "producer.cuh", "copy_rows(warp, lane", "wait(&storage_.empty[position.slot]"),
    (_FEW, "stages.cuh", "fence_shared_for_tma", "wait(&storage_.full["),
    (_FEW, "stages.cuh", "fence_shared_for_tma", "wait(&storage_.full_tokens["),
    (_ROWS, _QUANTIZER, "copy_rows(tile", "sync_token_warps()"),
    (_ROWS, _QUANTIZER, "if constexpr (kResultScales)", "sync_token_warps()"),
    (_ROWS, _QUANTIZER, "// The rows of all stages", "sync_token_warps()"),
    (_GROUPS, _QUANTIZER, "load_weights(map", "wait(&storage_.empty[position.slot]"),
    (_ROWS, _QUANTIZER, "encode(row, lane, step", "wait(&storage_.empty[position.slot]"),
    (_ROWS, "consumer.cuh", "epilogue.take_scales(", "wait_full(position)"),
]


@pytest.mark.parametrize(("variant", "file", "before", "call"), effort(_WAITS[3:4], _WAITS))
def test_a_missing_wait_is_found(
    sources: Path, tmp_path: Path, variant: MoeLinear, file: str, before: str, call: str
) -> None:
    sources = shutil.copytree(sources, tmp_path / "csrc")
    path = sources / "gemm_w8a8" / "moe" / file
    text = path.read_text()
    begin = text.rindex(call, 0, text.index(before))
    path.write_text(text[:begin] + text[text.index(";", begin) + 1 :])
    assert _run(sources, variant).returncode != 0


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
    assert _run(sources, _PAIRS, cases=24).returncode != 0
