"""Kernels that are missing: compiled on first use, or refused with the command that builds them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from jit_probe import Probe, build_recorder, fake_nvcc

from ostinato import _C
from ostinato.jit import compiler, loader, toolchain
from ostinato.jit.errors import KernelBuildError, MissingKernelError
from ostinato.ops.linear.gemm_variants import GemmSmallM, GemmTiled
from ostinato.ops.linear.quantize_cuda import Quantize

_VARIANT = Quantize(kind="silu_mul", in_dtype="bf16", out_dtype="e4m3")
_COMMAND = "python -m ostinato build --only quantize-silu_mul-bf16-e4m3"
_TILED = GemmTiled(dtype="int8", out_dtype="bf16", channels=128, tokens=128)


def test_without_a_driver_nothing_is_capturing() -> None:
    code = "from ostinato import _C; import sys; print(_C.is_capturing(0), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"]


def test_a_missing_kernel_is_compiled_with_one_line_then_kept(
    cache: Path, nvcc_calls: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    library = loader.load(_VARIANT, device=0, stream=0)
    assert isinstance(library, _C.Library)
    assert capfd.readouterr().err == (
        f"ostinato: compiling kernel {_VARIANT.name} once, into {cache}\n"
    )
    assert loader.load(_VARIANT, device=0, stream=0) is library
    assert loader.load(_VARIANT, device=1, stream=0) is not library
    assert capfd.readouterr().err == ""
    assert len(nvcc_calls.read_text().splitlines()) == 1


def test_the_library_is_prepared_for_each_device_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path / "cuda", build_recorder(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for device in (0, 0, 1):
        loader.load(_VARIANT, device=device, stream=0)
    (path,) = cache.glob("*/kernel.so")
    assert ctypes.CDLL(str(path)).times_prepared() == 2


def test_threads_that_ask_at_once_compile_once(nvcc_calls: Path) -> None:
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(loader.load(_VARIANT, device=0, stream=0)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert len(nvcc_calls.read_text().splitlines()) == 1


def test_nothing_is_compiled_with_jit_off(
    nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_JIT", "0")
    with pytest.raises(MissingKernelError, match=rf"OSTINATO_JIT=0 .*run `{_COMMAND}`"):
        loader.load(_VARIANT, device=0, stream=0)
    assert not nvcc_calls.exists()
    monkeypatch.delenv("OSTINATO_JIT")
    compiler.build([compiler.plan(_VARIANT)])
    monkeypatch.setenv("OSTINATO_JIT", "0")
    assert isinstance(loader.load(_VARIANT, device=0, stream=0), _C.Library)


def test_nothing_is_compiled_while_the_stream_is_captured(
    nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def capturing(stream: int) -> bool:
        asked.append(stream)
        return True

    monkeypatch.setattr(loader._C, "is_capturing", capturing)
    with pytest.raises(MissingKernelError, match=rf"being captured: run `{_COMMAND}`"):
        loader.load(_VARIANT, device=0, stream=99)
    assert asked == [99]
    assert not nvcc_calls.exists()


def test_without_nvcc_the_error_names_the_command(cache: Path, no_nvcc: None) -> None:
    with pytest.raises(MissingKernelError, match=rf"there is no nvcc .*run `{_COMMAND}`"):
        loader.load(_VARIANT, device=0, stream=0)


def test_without_cutlass_the_error_names_the_commands(
    nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "PACKAGED_CUTLASS", nvcc_calls)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    commands = rf"pip install --no-deps nvidia-cutlass==.*--only {_TILED.name}`"
    with pytest.raises(MissingKernelError, match=rf"no CUTLASS headers.*{commands}"):
        loader.load(_TILED, device=0, stream=0)


def test_a_failed_compilation_is_raised_and_tried_again(nvcc_calls: Path) -> None:
    bad = Probe(behaviour="fail")
    for _ in range(2):
        with pytest.raises(KernelBuildError, match="no such thing"):
            loader.load(bad, device=0, stream=0)
    assert len(nvcc_calls.read_text().splitlines()) == 2


def test_the_environment_chooses_the_build_mode(
    nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = GemmSmallM(out_dtype="bf16", max_m=8)
    monkeypatch.setenv("OSTINATO_JIT", "0")
    monkeypatch.setenv("OSTINATO_DELAY_SITE", "small_m_stage_release")
    with pytest.raises(
        MissingKernelError, match=r"--only gemm_small_m-\S+ --inject-delay small_m_stage_release`"
    ):
        loader.load(variant, device=0, stream=0)


def test_an_unknown_delay_site_in_the_environment_is_refused(
    nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_DELAY_SITE", "nowhere")
    with pytest.raises(ValueError, match="OSTINATO_DELAY_SITE: got 'nowhere', expected"):
        loader.load(_VARIANT, device=0, stream=0)
