"""Prefill attention's sources on the CPU, under random schedules: 8-bit keys and values."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels_emulation import compile_cases, compile_program, emulated_sources

from effort import effort, long_only
from ostinato.ops.attention.prefill_variants import AttentionPrefill

pytestmark = pytest.mark.nvcc

_CASES = effort(10, 60)
_CONVERTED = 4 * 2 * 256 * 256


def _variant(
    kv_dtype: str, keys: str, head_dim: int = 128, dtype: str = "bf16", **how: bool | int
) -> AttentionPrefill:
    return AttentionPrefill(head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, keys=keys, **how)


_USUAL = _variant("e4m3", "packed")
_WIDE = _variant("e4m3", "packed", warpgroups=3)
_OF_TOKENS = _variant("int8", "slots", token_scales=True)
_OF_TOKENS_64 = _variant("e4m3", "slots", head_dim=64, token_scales=True)
_VARIANTS = (
    _USUAL,
    _variant("e4m3", "slots", warpgroups=3),
    _variant("int8", "slots", head_dim=256),
    _OF_TOKENS,
    _OF_TOKENS_64,
    AttentionPrefill(head_dim=128, dtype="fp16", kv_dtype="e4m3", keys="packed", token_scales=True),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_sources(tmp_path_factory.mktemp("emulated") / "csrc")


@functools.cache
def _program(sources: Path, variant: AttentionPrefill) -> Path:
    """Compile the random calls of a kernel, once for all tests."""
    program = sources / variant.name
    defines = {**variant.defines(), "OSTINATO_ABI": "0"}
    compile_cases(sources, "prefill_cases.cpp", program, defines)
    return program


def _run(
    sources: Path, variant: AttentionPrefill, folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run random calls of a kernel; return how that ended and where their results are."""
    results = folder / f"{variant.name}.bin"
    command = [_program(sources, variant), "0", str(_CASES), results, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280), results


@pytest.mark.parametrize(
    "variant", effort(_VARIANTS[:1], _VARIANTS), ids=lambda variant: variant.name
)
def test_every_schedule_gives_the_right_rows(
    sources: Path, variant: AttentionPrefill, tmp_path: Path
) -> None:
    """With NaN in what nobody sees, scales included, and sometimes in what some queries see."""
    done, _ = _run(sources, variant, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("warpgroups", effort([0], [0, 3]))
def test_bits_are_those_of_dequantised_keys_and_values(
    sources: Path, warpgroups: int, tmp_path: Path
) -> None:
    """Of the 16-bit kernel, where scales are powers of two."""
    results = []
    for kv_dtype in ("e4m3", "fp16"):
        kernel = _variant(kv_dtype, "packed", dtype="fp16", warpgroups=warpgroups)
        done, path = _run(sources, kernel, tmp_path, "exact")
        assert done.returncode == 0, done.stdout[-3000:]
        results.append(path.read_bytes())
    assert results[0]
    assert results[0] == results[1]


@long_only
@pytest.mark.parametrize(
    ("variant", "call", "instead"),
    [
        (_USUAL, "wait(&barriers_of<What>(shared_).empty[position.slot], ", ""),
        (_WIDE, "return __all_sync(0xffffffff, is_complete(", "return true;"),
        (_WIDE, "wait_copies<1>();\n      } else {", ""),
        (_OF_TOKENS, "wait(scales_empty_of(shared_, position.slot), ", ""),
    ],
    ids=["for a stage", "for a stage ahead", "for copies", "for scales"],
)
def test_a_missing_wait_is_found(
    sources: Path, tmp_path: Path, variant: AttentionPrefill, call: str, instead: str
) -> None:
    sources = shutil.copytree(sources, tmp_path / "csrc")
    path = sources / "attention" / "prefill" / "kv_dequantizer.cuh"
    text = path.read_text()
    assert text.count(call) == 1
    end = text.index(";", text.index(call)) + 1
    path.write_text(text[: text.index(call)] + instead + text[end:])
    done, _ = _run(sources, variant, tmp_path)
    assert done.returncode != 0


def test_every_pair_of_8_bit_elements_is_converted_exactly(sources: Path, tmp_path: Path) -> None:
    program = tmp_path / "dequantize"
    compile_program(sources, Path(__file__).with_name("dequantize.cpp"), program)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout == f"{_CONVERTED}\n"
