"""Adapters of other libraries are no part of the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.bench.harness.peers import IN_CHECKOUT

ROOT = Path(__file__).parents[3]
# Whatever imports or loads a library that ours is compared with.
PEER = re.compile(
    r"(import_module\(|^\s*import |^\s*from |load_library\()\W*"
    r"(flashinfer|flash_attn|sgl_kernel|vllm|deep_gemm|triton)",
    re.MULTILINE,
)
LIST = """
import sys
import setuptools
from distutils.core import run_setup

packaging = run_setup("setup.py", stop_after="config").get_command_obj("build_py")
packaging.ensure_finalized()
print(*packaging.get_outputs(), sep="\\n", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the files that a wheel would hold, listed in a copy of the tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("runtime", "graphs", "csrc", "examples", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "results")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run = [sys.executable, "-c", LIST]
    done = subprocess.run(run, cwd=copy, capture_output=True, text=True, check=False)
    files = [Path(line) for line in done.stderr.splitlines() if line.startswith("build")]
    assert done.returncode == 0, done.stderr
    return [copy / "runtime" / str(file).partition("/ostinato/")[2] for file in files]


def test_a_wheel_holds_the_harness_and_no_adapter(packaged: list[Path]) -> None:
    names = {file.name for file in packaged if file.suffix == ".py"}
    assert {"runner.py", "rotation.py"} <= names
    adapters = {file.name for file in (ROOT / IN_CHECKOUT).glob("*.py")}
    assert {"flash_attn_3.py", "flashinfer.py", "sgl_kernel.py", "hugging_face.py"} <= adapters
    bench = {file.name for file in packaged if "bench" in file.parts and "graphs" not in file.parts}
    assert not bench & adapters
    assert not any("examples" in file.parts for file in packaged)


def test_no_packaged_benchmark_loads_a_peer(packaged: list[Path]) -> None:
    files = [file for file in packaged if {"bench", "cli"} & set(file.parts) and file.exists()]
    assert len(files) > 40
    assert [file.name for file in files if PEER.search(file.read_text())] == []


def test_the_search_for_loaded_peers_finds_those_of_adapters() -> None:
    files = [ROOT / IN_CHECKOUT / f"{name}.py" for name in ("flash_attn_3", "flashinfer")]
    assert all(PEER.search(file.read_text()) for file in files)
