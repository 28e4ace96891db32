"""Decode attention's sources on the CPU, under random schedules: right rows, and the same bits."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels_emulation import compile_cases, emulated_sources

from effort import effort, long_only, sampled
from ostinato.ops.attention.decode_variants import AttentionDecode

pytestmark = pytest.mark.nvcc

_CASES = effort(4, 12)


def _variant(**fields: int | bool) -> AttentionDecode:
    return AttentionDecode(head_dim=128, dtype="bf16", **fields)


_INVARIANT = {
    "cluster": _variant(split_tokens=1024, cluster=4),
    "alone": _variant(split_tokens=1024),
}
_OTHERS = (
    *(_variant(cluster=cluster) for cluster in (1, 2, 8)),
    *(_variant(columns=columns) for columns in (16, 32, 64)),
    _variant(copy_pages=False),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_sources(tmp_path_factory.mktemp("emulated") / "csrc")


@functools.cache
def _program(sources: Path, variant: AttentionDecode) -> Path:
    """Compile the random calls of a kernel, once for all tests."""
    program = sources / variant.name
    compile_cases(sources, "decode_cases.cpp", program, {**variant.defines(), "OSTINATO_ABI": "0"})
    return program


def _run(
    sources: Path, variant: AttentionDecode, folder: Path, loads: str | None = None
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run random calls of a kernel; return how that ended and where their results are."""
    results = folder / f"{variant.name}.bin"
    command = [_program(sources, variant), "0", str(_CASES), results, *filter(None, [loads])]
    return subprocess.run(command, capture_output=True, text=True, timeout=280), results


def _results(sources: Path, variant: AttentionDecode, folder: Path) -> bytes:
    """Return what random calls of a kernel give, after they were found right."""
    done, results = _run(sources, variant, folder)
    assert done.returncode == 0, done.stdout[-3000:]
    return results.read_bytes()


@pytest.mark.parametrize(
    "variant", effort(_OTHERS[1::8], _OTHERS), ids=lambda variant: variant.name
)
def test_every_schedule_gives_the_right_rows(
    sources: Path, variant: AttentionDecode, tmp_path: Path
) -> None:
    assert _results(sources, variant, tmp_path)


@long_only
def test_clusters_and_single_ctas_give_the_same_bits(sources: Path, tmp_path: Path) -> None:
    results = {name: _results(sources, variant, tmp_path) for name, variant in _INVARIANT.items()}
    assert results["cluster"] == results["alone"]


@long_only
@pytest.mark.parametrize(
    "variant", [_variant(), _INVARIANT["alone"]], ids=lambda variant: variant.name
)
def test_dynamic_scheduling_gives_the_right_rows(
    sources: Path, variant: AttentionDecode, tmp_path: Path
) -> None:
    done, _ = _run(sources, variant, tmp_path, "dynamic")
    assert done.returncode == 0, done.stdout[-3000:]


@long_only
@pytest.mark.parametrize("head_dim", [64, 128])
def test_throttled_warps_give_the_right_rows(sources: Path, head_dim: int, tmp_path: Path) -> None:
    variant = AttentionDecode(head_dim=head_dim, dtype="bf16", cluster=2)
    done, _ = _run(sources, variant, tmp_path, "throttled")
    assert done.returncode == 0, done.stdout[-3000:]


@long_only
def test_a_missing_wait_of_the_scheduler_is_found(sources: Path, tmp_path: Path) -> None:
    sources = shutil.copytree(sources, tmp_path / "csrc")
    path = sources / "attention" / "decode" / "dynamic_scheduler.cuh"
    text = path.read_text()
    awaited = "    wait(&ring_.published[slot], request / kScheduledAhead % 2);\n"
    assert text.count(awaited) == 1
    path.write_text(text.replace(awaited, ""))
    done, _ = _run(sources, _variant(), tmp_path, "dynamic")
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("file", "barrier"),
    sampled(
        [
            (
                "attention/decode/epilogue.cuh",
                "__syncthreads();\n      OSTINATO_DELAY(decode_sums_load",
            ),
            ("attention/decode/cluster_reduce.cuh", "wait(&storage_.arrived[warp], parity_);"),
        ],
        2,
    ),
)
def test_a_missing_barrier_is_found(sources: Path, tmp_path: Path, file: str, barrier: str) -> None:
    sources = shutil.copytree(sources, tmp_path / "csrc")
    path = sources / file
    text = path.read_text()
    assert text.count(barrier) == 1
    call = barrier.split(";")[0] + ";"
    path.write_text(text.replace(barrier, barrier.replace(call, "", 1)))
    done, _ = _run(sources, _variant(cluster=2), tmp_path)
    assert done.returncode != 0
