"""How kernels are launched, without a GPU: `csrc/common/launch.cuh` before a driver that prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ostinato.jit.sources import CSRC
from ostinato.jit.toolchain import require_nvcc


@pytest.mark.nvcc
def test_bytes_between_the_members_of_an_argument_are_zero(tmp_path: Path) -> None:
    """Left as they lay on the stack, they look like an address to an audit now and then."""
    program, source = tmp_path / "launch", Path(__file__).with_name("launch_padding.cpp")
    flags = ["-x", "c++", "-std=c++17", "-O2", "-DNDEBUG", "-cudart", "none", f"-I{CSRC}"]
    command = [str(require_nvcc().path), *flags, str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=20)
    assert printed.stdout == f"{'f' * 16} {'ffffffff':0>16} 7\n"
