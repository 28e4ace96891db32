"""docs/how-to/add-an-op.md, followed: four files make an op with a kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import code_blocks

import ostinato

PAGE = "docs/how-to/add-an-op.md"
FILES = {
    "csrc/scale_rows/params.h": "cpp",
    "csrc/scale_rows/scale_rows.cu": "cuda",
    "ops/scale_rows.py": "python",
}
OP = """
import torch
from ostinato.ops.scale_rows import scale_rows
x, scale = torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(3)
exact = (x.double() * scale.double()[:, None]).to(torch.bfloat16)
assert (scale_rows(x, scale) - exact).abs().max() <= 2 * exact.abs().max() * 2**-8
assert torch.ops.ostinato.scale_rows is not None
for bad in (lambda: scale_rows(x, scale[:2]), lambda: scale_rows(x.half(), scale)):
    try:
        bad()
    except (TypeError, ValueError) as error:
        print(error)
    else:
        raise AssertionError("bad input is taken")
"""
CATALOGUE = """
from ostinato.ops.catalogue import CATALOGUE
from ostinato.jit.registry import select
names = [variant.name for variant in select(CATALOGUE, only=["scale_rows"])]
assert names == ["scale_rows-bf16", "scale_rows-fp32"], names
(one,) = select(CATALOGUE, only=["scale_rows-bf16"])
assert one.dtype == "bf16"
"""
LIBRARY = """
import json, sys
from ostinato import _C
from ostinato.jit.budgets import read_budgets, excesses
from ostinato.jit.compiler import build, plan
from ostinato.ops.scale_rows import ScaleRows
from ostinato.cli.main import main
(entry,) = build([plan(ScaleRows(dtype="bf16"))])
library = _C.Library(str(entry.library))
print(library.fields)
assert entry.usage.spills == entry.usage.stack == 0
try:
    library.launch(x=0, stream=0)
except TypeError as error:
    print(error)
assert main(["kernels", "scale_rows", "--write-budgets", sys.argv[1]]) == 0
budgets = json.load(open(sys.argv[1]))
assert list(budgets) == ["scale_rows-bf16"]
assert excesses(entry.usage, budgets["scale_rows-bf16"]) == []
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a copy of the package that has the page's files, too."""
    folder = tmp_path_factory.mktemp("project")
    package = folder / "ostinato"
    # The install is a tree of links to folders: what they point to is copied, so that the new files
    # are written beside the copies and not into the repository.
    shutil.copytree(
        Path(ostinato.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, language in FILES.items():
        (code,) = code_blocks(PAGE, language)
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(code, encoding="utf-8")
    return folder


def run(project: Path, program: str, *arguments: str) -> str:
    """Run a program with that copy; return what it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(project),
        "OSTINATO_CACHE": str(project / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_op_runs_and_names_bad_input(project: Path) -> None:
    shape, dtype = run(project, OP).splitlines()
    assert shape.startswith("scale: got shape")
    assert dtype.startswith("x: got dtype torch.float16")


def test_the_catalogue_finds_its_kernels(project: Path) -> None:
    run(project, CATALOGUE)


@pytest.mark.nvcc
def test_its_library_says_which_fields_it_takes(project: Path, tmp_path: Path) -> None:
    fields, error = run(project, LIBRARY, str(tmp_path / "budgets.json")).splitlines()[:2]
    for name in ("x", "x_stride", "scale", "out", "rows", "dim", "pdl"):
        assert f"'{name}'" in fields
    assert "x_stride" in error
