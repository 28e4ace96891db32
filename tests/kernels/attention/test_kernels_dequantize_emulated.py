"""Dequantisation's source on the CPU: every conversion, and random calls under random schedules."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kernels_emulation import compile_cases, compile_program, emulated_sources

from effort import effort
from ostinato.ops.attention.dequantize_kv import DequantizeKV

pytestmark = pytest.mark.nvcc

_CONVERTED = 4 * 2 * 256 * 256
_VARIANTS = [("bf16", "e4m3"), ("fp16", "int8"), ("bf16", "int8"), ("fp16", "e4m3")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_sources(tmp_path_factory.mktemp("emulated") / "csrc")


def test_every_pair_of_8_bit_elements_is_converted_exactly(sources: Path, tmp_path: Path) -> None:
    program = tmp_path / "dequantize"
    compile_program(sources, Path(__file__).with_name("dequantize.cpp"), program)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout == f"{_CONVERTED}\n"


@pytest.mark.parametrize(("dtype", "kv_dtype"), effort(_VARIANTS[:1], _VARIANTS))
def test_every_token_that_is_seen_is_dequantised(
    sources: Path, dtype: str, kv_dtype: str, tmp_path: Path
) -> None:
    """In pages or packed, with windows, too little room, and guards behind each output."""
    program = tmp_path / "dequantize_kv"
    defines = DequantizeKV(dtype=dtype, kv_dtype=kv_dtype).defines()
    compile_cases(sources, "dequantize_kv_cases.cpp", program, {**defines, "OSTINATO_ABI": "0"})
    command = [program, "0", str(effort(20, 60))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
