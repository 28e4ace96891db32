"""The folder graphs/, copied alone into another project, works under any name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import code_blocks

ROOT = Path(__file__).parents[2]

# The block of "In a project of your own" of docs/graphs/index.md.
(SETUP,) = (block for block in code_blocks("docs/graphs/index.md") if "setuptools" in block)


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the extension as a project of its own builds it; it does not know its package's name."""
    pytest.importorskip("pybind11", reason="builds the extension")
    folder = tmp_path_factory.mktemp("extension")
    (folder / "mine").mkdir()
    source = ROOT / "csrc" / "graphs" / "module.cpp"
    assert "path/to/csrc/graphs/module.cpp" in SETUP
    setup = SETUP.replace("path/to/csrc/graphs/module.cpp", str(source))
    (folder / "setup.py").write_text(setup.replace("my_graphs.", "mine."))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        check=True,
        capture_output=True,
        env={**os.environ, "CFLAGS": "-O0"},  # which takes a third of the time
    )
    (built,) = (folder / "mine").glob("_native.*.so")
    return built


@pytest.fixture(params=["graphs", "my_graphs"])
def project(request: pytest.FixtureRequest, extension: Path, tmp_path: Path) -> Path:
    """Give a folder with a copy of graphs/, its extension in place, and the example."""
    package: str = request.param
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "graphs", tmp_path / package, ignore=ignored)
    shutil.copy(extension, tmp_path / package)
    example = (ROOT / "examples" / "decode_loop.py").read_text()
    imported = "from ostinato import graphs\n"
    assert example.count(imported) == 1
    (tmp_path / "loop.py").write_text(example.replace(imported, f"import {package} as graphs\n"))
    return tmp_path


def test_the_example_runs_without_the_rest(project: Path) -> None:
    # A finder that refuses `ostinato`, as where it is not installed.
    program = (
        "import sys, runpy\n"
        "sys.modules['ostinato'] = None\n"
        "sys.path.insert(0, '.')\n"
        "runpy.run_path('loop.py', run_name='__main__')\n"
    )
    alone = subprocess.run(
        [sys.executable, "-c", program], cwd=project, capture_output=True, text=True, timeout=120
    )
    assert alone.returncode == 0, alone.stderr[-2000:]
    installed = subprocess.run(
        [sys.executable, ROOT / "examples" / "decode_loop.py"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert _tokens(alone.stdout) == _tokens(installed.stdout)
    assert len(_tokens(alone.stdout)) > 20


def test_both_copies_can_be_imported_at_once(project: Path) -> None:
    (package,) = (path.parent.name for path in project.glob("*/_native.*.so"))
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        f"import {package} as copy, ostinato.graphs as installed\n"
        "assert copy.GraphRunner is not installed.GraphRunner\n"
        f"assert copy._native.FastReplay.__module__ == '{package}._native'\n"
        f"assert copy.GraphError.__module__ == '{package}.errors'\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=project, check=True, timeout=120)


def _tokens(output: str) -> list[str]:
    """Return the example's lines of tokens, and not those of its report, which have times."""
    return [line for line in output.splitlines() if re.fullmatch(r"[\[\]\d, None>-]+", line)]
