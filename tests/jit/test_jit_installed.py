"""Libraries of the package ostinato-kernels: when they are found, and when they are not."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from jit_probe import Probe

import ostinato
from ostinato.jit import cache as entries
from ostinato.jit import compiler, loader
from ostinato.jit.cache import Entry, pinned_library
from ostinato.jit.compiler import build, find, plan
from ostinato.jit.errors import MissingKernelError
from ostinato.jit.installed import PACKAGE, installed_folder
from ostinato.jit.mode import BuildMode

ROOT = Path(__file__).parents[2]
PLAN = plan(Probe())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the folder of the installed package, which has no library yet."""
    package = tmp_path / "site" / PACKAGE
    shutil.copytree(ROOT / "packaging" / "kernels" / PACKAGE, package)
    (package / "libraries").mkdir()
    monkeypatch.syspath_prepend(package.parent)
    installed_folder.cache_clear()
    yield package
    installed_folder.cache_clear()


@pytest.fixture
def installed(site: Path, nvcc_calls: Path, cache: Path) -> Path:
    """Give the folder of the one library that the package has, which the cache has no more."""
    (entry,) = build([PLAN])
    folder = site / "libraries" / entry.folder.name
    shutil.copytree(entry.folder, folder)
    shutil.rmtree(cache)
    return folder


def test_where_the_package_is_not_installed_there_is_no_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "runtime")])
    installed_folder.cache_clear()
    assert installed_folder() is None
    installed_folder.cache_clear()


def test_a_folder_that_is_no_package_is_not_taken(site: Path) -> None:
    (site / "__init__.py").unlink()
    assert installed_folder() is None


def test_it_is_found_where_the_cache_has_none(installed: Path, nvcc_calls: Path) -> None:
    before = nvcc_calls.read_text()
    entry = find(PLAN)
    assert entry is not None
    assert entry.folder == installed
    assert pinned_library(entry) == str(installed / "kernel.so")
    assert nvcc_calls.read_text() == before


def test_it_is_found_without_a_compiler(installed: Path, no_nvcc: None) -> None:
    entry = find(PLAN)
    assert entry is not None
    assert entry.folder == installed


def test_what_this_toolchain_has_made_goes_before_it(installed: Path, cache: Path) -> None:
    (made,) = build([PLAN])
    assert made.folder.parent == cache
    assert find(PLAN) == made


def test_other_sources_or_flags_are_not_found(
    installed: Path, no_nvcc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(PLAN, flags=(*PLAN.flags, "-DOTHER"))
    assert find(other) is None
    assert find(plan(Probe(), BuildMode(debug_print=True))) is None


def test_a_damaged_one_is_not_taken(installed: Path, no_nvcc: None) -> None:
    with (installed / "kernel.so").open("ab") as library:
        library.write(b"more")
    assert Entry.read(installed) is None
    with pytest.raises(MissingKernelError, match=f"is damaged in {installed} and there is no nvcc"):
        loader._entry(Probe(), 0, 0)


def test_its_owner_and_mode_are_the_installers(installed: Path, no_nvcc: None) -> None:
    for path in (installed.parent, installed, *installed.iterdir()):
        path.chmod(path.stat().st_mode | 0o022)
    assert find(PLAN) is not None
    # The same folder as a cache is refused.
    copy = installed.parents[1] / "copy"
    shutil.copytree(installed.parent, copy)
    with pytest.raises(entries.KernelCacheError, match="expected one by which only its owner"):
        Entry.read(copy / installed.name)


def test_a_link_in_it_is_not_followed(installed: Path, no_nvcc: None) -> None:
    (installed / "kernel.so").rename(installed / "other.so")
    (installed / "kernel.so").symlink_to(installed / "other.so")
    assert find(PLAN) is None


def test_the_loader_compiles_nothing_that_is_installed(installed: Path, nvcc_calls: Path) -> None:
    before = nvcc_calls.read_text()
    assert loader._entry(Probe(), 0, 0).folder == installed
    assert nvcc_calls.read_text() == before
    assert compiler.find(PLAN) is not None


def test_versions_and_licences_are_those_of_ostinato() -> None:
    project = tomllib.loads((ROOT / "packaging/kernels/pyproject.toml").read_text())["project"]
    assert project["version"] == ostinato.__version__
    assert {"Apache-2.0", "BSD-3-Clause"} <= set(project["license"].split())
    assert len(project["license-files"]) == 2


def test_a_record_names_what_the_wheel_holds(installed: Path) -> None:
    record = json.loads((installed / "build.json").read_text(encoding="utf-8"))
    assert record["variant"] == Probe().name
    assert set(record) == {field.name for field in dataclasses.fields(Entry)} - {"folder"}
