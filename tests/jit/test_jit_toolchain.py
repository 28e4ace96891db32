"""Where nvcc, ninja and CUTLASS are looked for, and how much of the machine a build may take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jit_probe import fake_nvcc

from ostinato.jit import resources, toolchain
from ostinato.jit.errors import KernelBuildError


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Leave nothing to find: no CUDA_HOME, an empty PATH, no packages."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/none:/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    for name in [name for name in sys.modules if name.split(".")[0] in ("nvidia", "ninja")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_nvcc_may_be_absent(bare: Path) -> None:
    assert toolchain.find_nvcc() is None
    with pytest.raises(KernelBuildError, match=r"nvcc not found .*pip install 'ostinato\[cuda\]'"):
        toolchain.require_nvcc()


def test_cuda_home_comes_before_path_before_pypi(
    bare: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = bare / "site" / "nvidia" / "cu13"
    fake_nvcc(package, recorder, version="13.1.2")
    (package / "lib").mkdir()
    monkeypatch.setattr(sys, "path", [str(bare / "site")])
    found = toolchain.find_nvcc()
    assert found is not None
    assert (found.version, found.path) == ("13.1.2", package / "bin" / "nvcc")
    assert found.library_folders == [package / "lib"]

    fake_nvcc(bare / "on_path", recorder, version="13.2.0")
    monkeypatch.setenv("PATH", f"{bare}/on_path/bin:/usr/bin:/bin")
    assert toolchain.require_nvcc().version == "13.2.0"

    fake_nvcc(bare / "home", recorder, version="12.9.41")
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    assert toolchain.require_nvcc().version == "12.9.41"
    assert toolchain.require_nvcc().library_folders == []


def test_a_cuda_home_without_a_compiler_is_passed_over(
    bare: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(bare))
    assert toolchain.find_nvcc() is None
    fake_nvcc(bare / "on_path", recorder)
    monkeypatch.setenv("PATH", f"{bare}/on_path/bin:/usr/bin:/bin")
    assert toolchain.require_nvcc().path == bare / "on_path" / "bin" / "nvcc"


@pytest.mark.parametrize(
    ("script", "match"),
    [("#!/bin/sh\nexit 3\n", "does not run"), ("#!/bin/sh\necho hello\n", "got 'hello")],
)
def test_an_nvcc_that_is_none_is_an_error(
    bare: Path, monkeypatch: pytest.MonkeyPatch, script: str, match: str
) -> None:
    nvcc = bare / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(script)
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(bare))
    with pytest.raises(KernelBuildError, match=match):
        toolchain.find_nvcc()


def test_ninja_of_the_environment_comes_first(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("path", "none"):
        (bare / folder).mkdir()
    monkeypatch.setenv("PATH", str(bare / "path"))
    with pytest.raises(KernelBuildError, match="ninja not found"):
        toolchain.find_ninja()
    for folder in ("path", "none"):
        ninja = bare / folder / "ninja"
        ninja.write_text("#!/bin/sh\n")
        ninja.chmod(0o755)
        assert toolchain.find_ninja() == ninja


def test_cutlass_is_found_without_importing_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = bare / "csrc" / "cutlass"
    monkeypatch.setattr(toolchain, "PACKAGED_CUTLASS", packaged)
    assert toolchain.find_cutlass() is None
    with pytest.raises(KernelBuildError, match=r"CUTLASS headers .*pip install --no-deps nvidia-"):
        toolchain.require_cutlass()
    package = bare / "site" / "cutlass_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('imported')\n")
    metadata = bare / "site" / "nvidia_cutlass-4.2.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: nvidia-cutlass\nVersion: 4.2.0.0\n")
    monkeypatch.setattr(sys, "path", [str(bare / "site")])
    found = toolchain.require_cutlass()
    assert found == toolchain.Cutlass(package / "source" / "include", "4.2.0.0")

    packaged.mkdir(parents=True)
    assert toolchain.require_cutlass() == found  # a checkout has the folder, with the licence only
    (packaged / "version.txt").write_text("4.1.0.0\n")
    assert toolchain.require_cutlass() == toolchain.Cutlass(packaged / "include", "4.1.0.0")


def _group(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text + "\n")
    return folder


def test_cores_respect_the_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: set(range(12)))
    assert resources.usable_cores(tmp_path) == 12
    assert resources.usable_cores(_group(tmp_path / "a", cpu_max="max 100000")) == 12
    assert resources.usable_cores(_group(tmp_path / "b", cpu_max="350000 100000")) == 3
    assert resources.usable_cores(_group(tmp_path / "c", cpu_max="50000 100000")) == 1


def test_memory_respects_the_containers_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:  2000 kB\n")
    kib = 1024
    assert resources.available_memory(tmp_path, meminfo) == 2000 * kib
    limited = _group(
        tmp_path / "a",
        memory_max=str(900 * kib),
        memory_current=str(800 * kib),
        memory_stat=f"anon 1\ninactive_file {500 * kib}",
    )
    assert resources.available_memory(limited, meminfo) == 600 * kib
    free = _group(tmp_path / "b", memory_max="max", memory_current="1")
    assert resources.available_memory(free, meminfo) == 2000 * kib
    full = _group(tmp_path / "c", memory_max="100", memory_current="900")
    assert resources.available_memory(full, meminfo) == 0


@pytest.mark.parametrize(
    ("cores", "gib", "size", "asked", "expected"),
    [(16, 64, 4, None, 16), (16, 15, 4, None, 3), (16, 1, 4, None, 1), (16, 64, 4, 2, 2)],
)
def test_jobs_are_capped_by_cores_memory_and_the_user(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    gib: int,
    size: int,
    asked: int | None,
    expected: int,
) -> None:
    monkeypatch.setattr(resources, "usable_cores", lambda: cores)
    monkeypatch.setattr(resources, "available_memory", lambda: gib << 30)
    assert resources.job_limit(size, asked) == expected
