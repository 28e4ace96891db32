"""Kernels' own sources on the CPU: compiled by the host's compiler, with `emulation/` for CUDA.

Threads are fibers that a random schedule runs; copies and stores to other CTAs land late and in
any order. So what a GPU does once in a million launches happens here in every one: a missing
barrier gives wrong rows, a wrong count of arrivals fails, a wait for nothing is a deadlock that is
reported. What is not emulated: time, caches, the order of memory between proxies, the predecessor
of a launch.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ostinato.jit.sources import CSRC
from ostinato.jit.toolchain import require_nvcc

_EMULATION = Path(__file__).with_name("emulation")
# Instructions among C++: of a file and a function, what the host does instead of each.
_INSTRUCTIONS = {
    ("attention/decode/cluster_ops.cuh", "arrive_in_cluster"): "emulator::arrive_in_cluster();",
    ("attention/decode/cluster_ops.cuh", "wait_for_cluster"): "emulator::wait_for_cluster();",
    ("attention/decode/cluster_ops.cuh", "send"): (
        "char* const to = emulator::shared_of(rank) + shared_address(target);"
        "const uint32_t at = shared_address(barrier);"
        "emulator::defer([=] {"
        "  std::memcpy(to, &value, sizeof(value)); tell_barrier(rank, at, 0, -16l); });"
    ),
    ("attention/decode/combine.cuh", "arrive_last"): "before = atomicInc(counter, ctas - 1);",
    ("attention/common/dequant.cuh", "e4m3_to_fp16"): (
        "uint16_t halves[4];"
        "for (int i = 0; i < 4; ++i) {"
        "  halves[i] = __nv_cvt_fp8_to_halfraw(word >> (8 * i) & 0xff, __NV_E4M3).x; }"
        "std::memcpy(&pairs, halves, sizeof(pairs));"
    ),
    ("common/vector.cuh", "load_constant"): "quad = *address;",
    ("common/quantize_math.cuh", "max_magnitude"): (
        "y = std::isnan(a) || std::isnan(b) ? NAN : std::max(a, std::fabs(b));"
    ),
    ("common/quantize_math.cuh", "clamp"): (
        "y = std::isnan(x) ? x : std::max(x, low);",
        "y = std::isnan(y) ? y : std::min(y, high);",
    ),
    ("common/quantize_math.cuh", "approximate_inverse_of"): "z = 1.0f / d;",
    ("gemm_w8a8/quantize/silu_math.cuh", "one_and_exp"): "power = std::exp2(part);",
    ("gemm_w8a8/quantize/activation_math.cuh", "relu"): (
        "y = std::isnan(x) ? x : std::max(x, 0.0f);"
    ),
    ("gemm_w8a8/quantize/stages.cuh", "Row"): "",
    ("gemm_w8a8/quantize/stages.cuh", "discard_line"): "",
    ("gemm_w8a8/moe/quantizing_producer.cuh", "wait_until_copied"): "",
    ("common/registers.cuh", "give_up_registers"): "",
    ("common/registers.cuh", "take_registers"): "",
}
_KERNELS = (
    "attention/decode/decode_sm90.cu",
    "attention/dequantize/dequantize_kv.cu",
    "gemm_w8a8/fused/activated_linear_sm90.cu",
    "gemm_w8a8/fused/fused_linear_sm90.cu",
    "gemm_w8a8/moe/moe_linear_sm90.cu",
    "moe_route/moe_route.cu",
)
_SHARED = r"extern __shared__ (__align__\(1024\) )?uint8_t storage\[\];"
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-w",
    "-DNDEBUG",
    "-Xcompiler",
    "-fno-strict-aliasing",
    "-cudart",
    "none",
)


def emulated_sources(folder: Path) -> Path:
    """Copy csrc/ into a folder, with the host's versions of what only a GPU has."""
    shutil.copytree(CSRC, folder)
    for (name, function), code in _INSTRUCTIONS.items():
        path = folder / name
        for each in (code,) if isinstance(code, str) else code:
            path.write_text(_without_instruction(path.read_text(), function, each))
    here = "uint8_t* const storage = reinterpret_cast<uint8_t*>(emulator::shared);"
    for name in _KERNELS:
        text = (folder / name).read_text()
        text, places = re.subn(_SHARED, here, text)
        assert places
        (folder / name).write_text(text)
    shutil.copytree(_EMULATION, folder, dirs_exist_ok=True)
    return folder


def compile_cases(sources: Path, cases: str, program: Path, defines: Mapping[str, str]) -> None:
    """Compile the random calls of one kernel; `cases` is a file of `emulation/`."""
    compile_program(sources, sources / cases, program, defines)


def compile_program(
    sources: Path, main: Path, program: Path, defines: Mapping[str, str] | None = None
) -> None:
    """Compile a program of emulated sources.

    The emulator is compiled with the first program of a folder.
    """
    macros = [f"-D{name}={value}" for name, value in (defines or {}).items()]
    emulator, compiled = sources / "emulator.o", Path(f"{program}.o")
    if not emulator.exists():
        _run_nvcc(sources, "-c", sources / "emulator.cpp", "-o", emulator)
    _run_nvcc(sources, *macros, "-c", main, "-o", compiled)
    _run_nvcc(sources, compiled, emulator, "-o", program)


def _run_nvcc(sources: Path, *arguments: str | Path) -> None:
    command = [require_nvcc().path, *_FLAGS, f"-I{sources}", *arguments]
    subprocess.run(command, check=True, timeout=250)


def _without_instruction(text: str, function: str, code: str) -> str:
    """Put code in the place of the first `asm` of a function."""
    begin = text.index(f" {function}(")
    begin += re.search(r"asm( volatile)?\(", text[begin:]).start()
    end = text.index(");\n", begin) + len(");")
    return text[:begin] + code + text[end:]
