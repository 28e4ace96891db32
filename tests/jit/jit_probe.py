"""The tests' own kernels, a stand-in for nvcc, and a library that records its arguments."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ostinato.jit.sources import CSRC, read_sources
from ostinato.jit.variant import Variant

HERE = Path(__file__).parent
QUANTIZE = CSRC / "gemm_w8a8" / "quantize" / "quantize.cu"

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
    needs: ClassVar[frozenset[str]] = frozenset()

    waste: int = 0
    behaviour: str = "work"

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
    needs: ClassVar[frozenset[str]] = frozenset()

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
#include "common/entry.h"
#include "{header}"
namespace {{ {params} seen; void* seen_stream; int prepared; }}
OSTINATO_EXPORT const char* ostinato_error_string(int error) {{
  return error == 1 ? "invalid argument" : "unknown";
}}
OSTINATO_EXPORT int ostinato_prepare(void) {{ ++prepared; return {prepare}; }}
OSTINATO_LAUNCH({params}) {{
  seen = *params;
  seen_stream = stream;
  return {launch};
}}
OSTINATO_EXPORT const {params}* recorded(void) {{ return &seen; }}
OSTINATO_EXPORT void* recorded_stream(void) {{ return seen_stream; }}
OSTINATO_EXPORT int times_prepared(void) {{ return prepared; }}
{extra}
"""


def params_of(source: Path) -> tuple[str, str]:
    """Return the struct that the launch of a kernel's source takes, and its header below csrc/."""
    found = re.search(r"OSTINATO_LAUNCH\(([\w:]+)\)", source.read_text(encoding="utf-8"))
    assert found is not None, source
    struct = found[1].rpartition("::")[2]
    texts = read_sources(source).texts
    (header,) = (name for name, text in texts.items() if f"\nstruct {struct} {{" in text)
    return found[1], header


def build_recorder(
    folder: Path,
    source: Path = QUANTIZE,
    *,
    prepare: int = 0,
    launch: int = 0,
    extra: str = "",
) -> Path:
    """Compile, for the host, a library that keeps the arguments of its last launch.

    They are those of the kernel of `source`.
    """
    params, header = params_of(source)
    text = _RECORDER.format(
        params=params, header=header, prepare=prepare, launch=launch, extra=extra
    )
    return build_library(folder, text)


def build_library(folder: Path, text: str) -> Path:
    """Compile a source for the host, as a shared library in `folder`."""
    source, library = folder / "recorder.cpp", folder / "recorder.so"
    source.write_text(text)
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}", source, "-o", library], check=True
    )
    return library
