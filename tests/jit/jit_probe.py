"""The tests' own kernels, a stand-in for nvcc, and a library that records its arguments."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ostinato import _C
from ostinato.jit.sources import CSRC
from ostinato.jit.variant import Variant

HERE = Path(__file__).parent

PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5probe' for 'sm_90a'
ptxas info    : Function properties for _Z5probe
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 42 registers, used 1 barriers, 128 bytes smem
"""

# Answers as nvcc does: its version, or a library and what ptxas says. The defines of a variant
# choose its behaviour.
_FAKE_NVCC = """\
#!/bin/bash
if [ "$1" = --version ]; then
  echo "Cuda compilation tools, release {release}, V{version}"
  exit
fi
echo "$*" >> {calls}
output=$(sed 's/.* -o \\([^ ]*\\).*/\\1/' <<< "$*")
case "$*" in
  *-DPROBE_BEHAVIOUR=partial*)
    head -c 100 {library} > $output
    echo "ld: fatal: No space left on device" >&2
    exit 1;;
  *-DPROBE_BEHAVIOUR=fail*) echo "probe.cu(1): error: no such thing" >&2; exit 2;;
  *-DPROBE_BEHAVIOUR=full*) echo "fatal: No space left on device" >&2; exit 1;;
  *-DPROBE_BEHAVIOUR=slow*) echo $$ > {calls}.started; sleep 20;;
  *-DPROBE_BEHAVIOUR=pause*) sleep 0.3;;
esac
cat >&2 <<'LOG'
{log}LOG
cp {library} $output
"""


@dataclass(frozen=True, kw_only=True)
class Probe(Variant):
    """The kernel of probe.cu; `waste` is bytes of local memory, `behaviour` is for fake nvcc."""

    family: ClassVar[str] = "probe"
    source: ClassVar[Path] = HERE / "probe.cu"

    waste: int = 0
    behaviour: str = "work"

    @property
    def params(self) -> tuple[Path, ...]:
        folder = CSRC / "gemm_w8a8"
        return (folder / "params.h", folder / "gemm_w8a8/quantize/params.h")

    @property
    def name(self) -> str:
        return f"probe-{self.waste}-{self.behaviour}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_PROBE_WASTE": str(self.waste), "PROBE_BEHAVIOUR": self.behaviour}


@dataclass(frozen=True, kw_only=True)
class LateWriter(Variant):
    """The kernel of late_writer.cu, which is launched by `ostinato_write_late`."""

    family: ClassVar[str] = "late_writer"
    source: ClassVar[Path] = HERE / "late_writer.cu"

    @property
    def params(self) -> tuple[Path, ...]:
        return (CSRC / "attention" / "params.h",)

    @property
    def name(self) -> str:
        return "late_writer"

    def defines(self) -> dict[str, str]:
        return {}


def fake_nvcc(home: Path, library: Path, version: str = "13.0.88") -> Path:
    """Write a CUDA_HOME whose nvcc gives this library for every source; return its call list."""
    calls = home / "calls.txt"
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        _FAKE_NVCC.format(
            release=version.rpartition(".")[0],
            version=version,
            calls=calls,
            log=PTXAS_LOG,
            library=library,
        )
    )
    nvcc.chmod(0o755)
    return calls


_RECORDER = """\
#include <cstdint>
#include <cstdio>
#include <cstring>
#include "{header}"
#define EXPORT extern "C" __attribute__((visibility("default")))
namespace {{ ostinato::{params} seen; void* seen_stream; int prepared; }}
EXPORT uint64_t ostinato_abi_version(void) {{ return {abi}; }}
EXPORT const char* ostinato_error_string(int error) {{
  return error == 1 ? "invalid argument" : "unknown";
}}
EXPORT int ostinato_prepare(void) {{ ++prepared; return {prepare}; }}
EXPORT int ostinato_launch(const ostinato::{params}* params, void* stream) {{
  seen = *params;
  seen_stream = stream;
  return {launch};
}}
EXPORT const ostinato::{params}* recorded(void) {{ return &seen; }}
EXPORT void* recorded_stream(void) {{ return seen_stream; }}
EXPORT int times_prepared(void) {{ return prepared; }}
{extra}
"""


# Where the structs of parameters are, and their hashes by the loader's names.
_HEADERS = {
    "AppendKVParams": ("attention/common/params.h", "attention"),
    "EmbedParams": ("embed/params.h", "embed"),
    "FusedLinearParams": ("gemm_w8a8/fused/params.h", "fused_linear"),
    "MergeStatesParams": ("attention/merge/params.h", "merge"),
    "PagedDecodeParams": ("attention/common/params.h", "attention"),
    "PaddedQuantizeParams": ("gemm_w8a8/quantize/params.h", "gemm_w8a8_quantize"),
    "SampleParams": ("sampling/params.h", "sampling"),
    "ScaledPrefillParams": ("attention/prefill/params.h", "attention_prefill"),
    "W8A8GemmParams": ("gemm_w8a8/params.h", "gemm_w8a8"),
}


def build_recorder(
    folder: Path,
    params: str = "PaddedQuantizeParams",
    *,
    abi: str | None = None,
    prepare: int = 0,
    launch: int = 0,
    extra: str = "",
) -> Path:
    """Compile, for the host, a kernel library that keeps the arguments of its last launch."""
    source = folder / "recorder.cpp"
    header, abi_name = _HEADERS[params]
    source.write_text(
        _RECORDER.format(
            params=params,
            header=header,
            abi=abi or f"{_C.ABI[abi_name]}ULL",
            prepare=prepare,
            launch=launch,
            extra=extra,
        )
    )
    library = folder / "recorder.so"
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}", source, "-o", library], check=True
    )
    return library
