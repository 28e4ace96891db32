"""Zeroes the code of other GPUs in a CUDA library, so that it packs small.

    python tests/gpu_runs/experts/slim.py LIBRARY OUT

OUT is LIBRARY with the machine code of sm_90 and sm_90a alone; other GPUs' code and all PTX are
zeros of the same length, which xz packs to nothing. It is meant for vLLM's `_moe_C`, which run.sh
takes from moe_site.tar.xz. Needs readelf, and no GPU.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

_SECTION = " .nv_fatbin "
_MAGIC = 0xBA55ED50  # begins a container of that section
_CONTAINER = "<IHHQ"  # magic, version, bytes of this header, bytes of the entries behind it
_ENTRY = "<HHIQIIHHI"  # kind, -, bytes of this header, bytes of code, -, -, -, -, architecture
_MACHINE_CODE = 2  # the kind of an entry that is no PTX


def section(library: Path) -> tuple[int, int]:
    """Return where the section of GPU code begins and ends in the file."""
    argv = ["readelf", "-SW", str(library)]
    lines = subprocess.run(argv, capture_output=True, text=True).stdout.splitlines()
    row = next(line for line in lines if _SECTION in line).split("]", 1)[1].split()
    return int(row[3], 16), int(row[3], 16) + int(row[4], 16)


def slim(library: Path, out: Path) -> None:
    data = bytearray(library.read_bytes())
    at, end = section(library)
    kept = zeroed = containers = 0
    while at < end:
        magic, _, header, size = struct.unpack_from(_CONTAINER, data, at)
        if magic != _MAGIC:
            at += 8
            continue
        containers += 1
        entry, stop = at + header, at + header + size
        while entry < stop:
            kind, _, skipped, length, *_, arch = struct.unpack_from(_ENTRY, data, entry)
            if kind == _MACHINE_CODE and arch == 90:
                kept += length
            else:
                data[entry + skipped : entry + skipped + length] = bytes(length)
                zeroed += length
            entry += skipped + length
        at = stop
    out.write_bytes(data)
    print("kept", kept, "zeroed", zeroed, "containers", containers)


if __name__ == "__main__":
    slim(*map(Path, sys.argv[1:]))
