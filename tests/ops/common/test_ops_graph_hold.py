"""What the loader asks the driver about captures, of a driver that only says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A capture has the id of its stream; a graph's user object is destroyed by `drop`.
_DRIVER = """
#include <stdint.h>
#include <stdlib.h>
static void (*destroy)(void*);
static void* state;
static int released;
int cuStreamIsCapturing(void* stream, int* status) { *status = stream != 0; return 0; }
int INFO(void* stream, int* status, uint64_t* id, void** graph, void* a, void* b EXTRA) {
  if ((uintptr_t)stream == 99) { return 901; }
  *status = stream == 0 ? 0 : (uintptr_t)stream == 98 ? 2 : 1;
  *id = (uintptr_t)stream; *graph = stream;
  return a != 0 || b != 0;
}
int cuUserObjectCreate(void** object, void* ptr, void (*fn)(void*), unsigned count,
                       unsigned flags) {
  destroy = fn; state = ptr; *object = &state;
  return count != 1 || flags != 1;
}
int cuGraphRetainUserObject(void* graph, void* object, unsigned count, unsigned flags) {
  return (uintptr_t)graph == 97 ? 1 : graph == 0 || object != &state || count != 1 || flags != 1;
}
int cuUserObjectRelease(void* object, unsigned count) {
  released += count; destroy(state); return 0;
}
void drop(void) { destroy(state); }
int releases(void) { return released; }
"""


def run(tmp_path: Path, code: str, *defines: str) -> list[str]:
    """Run code in a process that has loaded the driver as CUDA's; return what it printed."""
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(_DRIVER)
    compiled = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *defines]
    subprocess.run([*compiled, "-o", str(library), str(source)], check=True)
    whole = (
        f"import ctypes; cuda = ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)\n"
        f"from ostinato import _C\n{code}"
    )
    said = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    return said.stdout.split()


DRIVERS = pytest.mark.parametrize(
    "defines",
    [("-DINFO=cuStreamGetCaptureInfo_v3", "-DEXTRA=,void*c"),
     ("-DINFO=cuStreamGetCaptureInfo_v2", "-DEXTRA=")],
    ids=["CUDA 12.3", "CUDA 12.0"],
)  # fmt: skip


@DRIVERS
def test_a_capture_has_an_id(tmp_path: Path, defines: tuple[str, ...]) -> None:
    """But none that was invalidated, and none of a stream that may not be asked."""
    code = "print(*(_C.capture_of(stream) for stream in (0, 5, 98, 99)))"
    assert run(tmp_path, code, *defines) == ["0", "5", "0", "0"]


@DRIVERS
def test_a_hold_ends_with_its_graph(tmp_path: Path, defines: tuple[str, ...]) -> None:
    code = "hold = _C.GraphHold(5); print(hold.is_alive); cuda.drop(); print(hold.is_alive)"
    assert run(tmp_path, code, *defines) == ["True", "False"]


def test_a_graph_may_outlive_its_hold(tmp_path: Path) -> None:
    code = "hold = _C.GraphHold(5); del hold; cuda.drop(); print('alive')"
    assert run(tmp_path, code, "-DINFO=cuStreamGetCaptureInfo_v2", "-DEXTRA=") == ["alive"]


@pytest.mark.parametrize(
    ("stream", "message"), [(0, "not being captured"), (97, "cuGraphRetainUserObject: CUresult 1")]
)
def test_a_hold_that_fails_leaves_nothing(tmp_path: Path, stream: int, message: str) -> None:
    code = (
        f"try: _C.GraphHold({stream})\n"
        f"except RuntimeError as error: print({message!r} in str(error), cuda.releases())"
    )
    expected = "1" if stream else "0"
    defines = ("-DINFO=cuStreamGetCaptureInfo_v2", "-DEXTRA=")
    assert run(tmp_path, code, *defines) == ["True", expected]


def test_an_old_driver_is_named(tmp_path: Path) -> None:
    code = "try: _C.capture_of(5)\nexcept RuntimeError as error: print('CUDA 12' in str(error))"
    assert run(tmp_path, code, "-DINFO=cuStreamGetCaptureInfo", "-DEXTRA=") == ["True"]


def test_without_a_driver_nothing_is_in_a_capture() -> None:
    code = "from ostinato import _C; print(_C.capture_of(5))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["0"]
