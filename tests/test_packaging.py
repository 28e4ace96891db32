"""What PyPI reads, what a wheel and an sdist hold, and what `pip install` puts on PATH."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest
from trove_classifiers import classifiers

import ostinato
from ostinato import __main__ as entry
from ostinato.jit.compiler import plan
from ostinato.jit.sources import ENTRY
from ostinato.jit.toolchain import INSTALL_CUTLASS, Cutlass, require_cutlass, require_nvcc
from ostinato.ops.attention.prefill_variants import AttentionPrefill
from ostinato.ops.linear.gemm_variants import GemmTiled

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCRIPT = Path(sysconfig.get_path("scripts"), "ostinato")
URL = "https://example.org/owner/ostinato"
CUTLASS = "csrc/third_party/cutlass/"


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Return the files of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository to compare with")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of an sdist that is built from a copy of the repository."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    code = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    site = require_cutlass().include.parents[2]
    environment = {**os.environ, "OSTINATO_PROJECT_URL": URL, "OSTINATO_CUTLASS": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code, out], cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (archive,) = out.iterdir()
    assert archive.name == f"ostinato-{ostinato.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        return {
            member.name.partition("/")[2]: file.read()
            for member in tar.getmembers()
            if (file := tar.extractfile(member)) is not None
        }


def test_one_version_everywhere() -> None:
    releases = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert PROJECT["version"] == ostinato.__version__ == releases[0]
    assert importlib.metadata.version("ostinato") == ostinato.__version__


def test_the_changelog_of_a_release_is_short() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_pypi_knows_every_classifier() -> None:
    assert set(PROJECT["classifiers"]) <= classifiers


def test_the_extra_cuda_brings_no_python_library_of_kernels() -> None:
    names = {re.split(r"[^\w-]", name)[0] for name in PROJECT["optional-dependencies"]["cuda"]}
    assert not names & {"nvidia-cutlass", "nvidia-cutlass-dsl", "scipy"}


def test_one_version_of_cutlass_everywhere(sdist: dict[str, bytes]) -> None:
    (pin,) = re.findall(r"^nvidia-(cutlass==.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"nvidia-{pin}`" in INSTALL_CUTLASS
    assert sdist[CUTLASS + "version.txt"].decode() == f"{pin.removeprefix('cutlass==')}\n"


def test_the_sdist_is_the_repository(sdist: dict[str, bytes], tracked: list[str]) -> None:
    assert set(tracked) <= set(sdist)
    made = {name for name in sdist if not name.startswith("ostinato.egg-info/")} - set(tracked)
    headers = {name for name in made if name.startswith(CUTLASS + "include/")}
    assert made - headers == {"PKG-INFO", "setup.cfg", CUTLASS + "version.txt"}


def test_the_repository_has_no_header_of_cutlass(tracked: list[str]) -> None:
    assert {name for name in tracked if name.startswith(CUTLASS)} == {
        CUTLASS + "LICENSE.txt",
        CUTLASS + "README.md",
    }


def test_the_headers_in_the_sdist_are_those_of_cutlass(sdist: dict[str, bytes]) -> None:
    headers = {name: text for name, text in sdist.items() if name.startswith(CUTLASS + "include/")}
    assert 30 <= len(headers) < 60
    for name, text in headers.items():
        assert b"SPDX-License-Identifier: BSD-3-Clause" in text
        assert (
            text == require_cutlass().include.joinpath(name.partition("include/")[2]).read_bytes()
        )


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "variant",
    [
        AttentionPrefill(dtype="bf16", head_dim=128),
        GemmTiled(dtype="int8", out_dtype="bf16", channels=128, tokens=128),
    ],
    ids=lambda variant: variant.family,
)
def test_the_headers_in_the_sdist_are_all_that_kernels_include(
    variant: AttentionPrefill | GemmTiled, sdist: dict[str, bytes], tmp_path: Path
) -> None:
    for name in (name for name in sdist if name.startswith(CUTLASS + "include/")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(sdist[name])
    include = tmp_path / CUTLASS / "include"
    command = plan(variant).command(require_nvcc(), Cutlass(include, "0"))
    listing = [*command[: command.index("-o")], "-M"]
    listing = [word for word in listing if word not in ("-shared", str(ENTRY))]
    done = subprocess.run(listing, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert str(include / "cute/arch/mma_sm90_gmma.hpp") in done.stdout


def test_project_urls_come_from_the_environment(sdist: dict[str, bytes]) -> None:
    metadata = Parser().parsestr(sdist["PKG-INFO"].decode())
    assert metadata["License-Expression"] == "Apache-2.0 AND BSD-3-Clause"
    assert len(metadata.get_all("License-File", [])) == 2
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls["Source"] == URL
    assert urls["Issues"] == f"{URL}/issues"


def test_the_package_holds_all_of_csrc(tracked: list[str]) -> None:
    installed = Path(ostinato.__file__).parent
    sources = [name for name in tracked if re.search(r"^csrc/.*\.(cuh?|h|hpp|cpp)$", name)]
    assert len(sources) > 100
    assert [name for name in sources if not (installed / name).is_file()] == []


def test_the_console_script_is_the_module() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ostinato")
    assert script.load() is entry.run


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("--loud", 2)])
def test_the_console_script_does_what_the_module_does(argument: str, code: int) -> None:
    commands = [[SCRIPT, argument], [sys.executable, "-m", "ostinato", argument]]
    script, module = (subprocess.run(run, capture_output=True, text=True) for run in commands)
    assert script.returncode == module.returncode == code
    assert (script.stdout, script.stderr) == (module.stdout, module.stderr)
    assert script.stdout or script.stderr


def test_the_line_of_make_demo_generates() -> None:
    listed = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={sys.prefix}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in listed.stdout.splitlines() if " generate " in line)
    assert line.startswith(f"{SCRIPT} generate examples/tiny-llama ")
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    prompts = re.findall(r'"(.*?)"', line)
    assert len(prompts) == 4
    # The headings cut long prompts.
    assert all(f"/4: {prompt[:40]}" in done.stdout for prompt in prompts)
