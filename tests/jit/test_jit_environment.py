"""What changes a library is in its key, or does not reach the compiler."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_probe import Probe

from ostinato.jit import compiler, loader
from ostinato.jit.compiler import build, find, plan
from ostinato.jit.errors import KernelBuildError
from ostinato.jit.toolchain import compiler_environment, find_nvcc

_ITEM = plan(Probe())

# Of nvcc and its profile, of gcc, of ld, of clang, and of what wraps them.
_CHANGES_OUTPUT = (
    *("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CICC_PATH", "NVVMIR_LIBRARY_DIR"),
    *("INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES", "CUDAFE_FLAGS", "PTXAS_FLAGS", "OPENCC_FLAGS"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH"),
    *("GCC_EXEC_PREFIX", "SOURCE_DATE_EPOCH", "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES"),
    *("LD_RUN_PATH", "LDEMULATION", "GNUTARGET", "LD_PRELOAD", "CCC_OVERRIDE_OPTIONS"),
    *("CFLAGS", "CXXFLAGS", "LDFLAGS", "NIX_CFLAGS_COMPILE", "NIX_LDFLAGS", "CCACHE_PREFIX"),
)


def _seen(home: Path) -> dict[str, str]:
    """Return the environment that the stand-in for nvcc has written down."""
    lines = (home / "environment").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if line)


@pytest.fixture
def home(nvcc_calls: Path) -> Path:
    """Give the CUDA_HOME of a compiler that writes its environment down."""
    script = nvcc_calls.parent / "bin" / "nvcc"
    lines = script.read_text().split("\n", 1)
    script.write_text("\n".join([lines[0], f"env -0 > {nvcc_calls.parent}/environment", lines[1]]))
    return nvcc_calls.parent


def test_what_changes_the_output_does_not_reach_the_compiler(
    home: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = build([_ITEM])
    for name in _CHANGES_OUTPUT:
        if name not in ("NVCC_CCBIN", "LD_PRELOAD"):  # one is in the key, one is for us, too
            monkeypatch.setenv(name, "/planted")
    monkeypatch.setenv("OSTINATO_SECRET", "s")
    assert find(_ITEM) == before
    build([plan(Probe(waste=1))])
    seen = _seen(home)
    assert not seen.keys() & {*_CHANGES_OUTPUT, "OSTINATO_SECRET"}
    assert seen["PATH"] == os.environ["PATH"]
    assert seen["TMPDIR"] == "."
    assert seen["PWD"].startswith(f"{cache}/unfinished-")  # where temporary files are then


def test_nvcc_is_asked_for_its_version_in_the_same_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--bogus")
    assert find_nvcc() is not None
    assert "NVCC_APPEND_FLAGS" not in _seen(home)


@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,20}", fullmatch=True), st.just("x")))
def test_only_named_variables_reach_the_compiler(given_names: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {**os.environ, **given_names})
        passed = compiler_environment()
        assert passed.items() <= os.environ.items()
        languages = {"LANG", "LC_ALL", "LC_CTYPE", "LC_MESSAGES"}
        assert passed.keys() <= {"PATH", "LD_LIBRARY_PATH", "HOME"} | languages


def test_the_host_compiler_is_passed_and_in_the_key(
    home: Path, nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = build([_ITEM])
    folders = {plain.folder}
    for chosen in ("g++-12", "/usr/bin/g++", "/opt/gcc/bin"):
        monkeypatch.setenv("NVCC_CCBIN", chosen)
        assert find(_ITEM) is None
        (built,) = build([_ITEM])
        assert f" -ccbin {chosen} " in f" {nvcc_calls.read_text().splitlines()[-1]} "
        folders.add(built.folder)
        assert find(_ITEM) == built
    assert len(folders) == 4
    monkeypatch.setenv("NVCC_CCBIN", "")
    assert find(_ITEM) == plain
    assert "-ccbin" not in nvcc_calls.read_text().splitlines()[0]


def test_without_nvcc_a_library_of_any_host_compiler_serves(
    home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("NVCC_CCBIN", "g++-12")
    (built,) = build([_ITEM])
    monkeypatch.delenv("NVCC_CCBIN")
    request.getfixturevalue("no_nvcc")
    assert find(_ITEM) == built


def test_a_relative_host_compiler_is_that_of_the_current_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NVCC_CCBIN", "./gcc/g++")
    found = find_nvcc()
    assert found is not None
    assert found.host_compiler == str(tmp_path / "gcc" / "g++")
    build([_ITEM])
    monkeypatch.chdir("/")
    assert find(_ITEM) is None


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Give a folder with headers, tools and options that must not be found."""
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "cuda_runtime.h").write_text("#error planted\n")
    (folder / "stdint.h").write_text("#error planted\n")
    for tool in ("as", "ld", "collect2", "cc1plus"):
        (folder / tool).write_text("#!/bin/sh\nexit 1\n")
        (folder / tool).chmod(stat.S_IRWXU)
    return folder


_HOSTILE: dict[str, Callable[[Path], str]] = {
    "NVCC_PREPEND_FLAGS": lambda folder: "--bogus",
    "NVCC_APPEND_FLAGS": lambda folder: "--bogus",
    "PTXAS_FLAGS": lambda folder: "--bogus",
    "CUDAFE_FLAGS": lambda folder: "--bogus",
    "INCLUDES": lambda folder: f"-I{folder}",
    "CPATH": str,
    "CPLUS_INCLUDE_PATH": str,
    "COMPILER_PATH": str,
    "GCC_EXEC_PREFIX": lambda folder: f"{folder}/",
    "LD_RUN_PATH": str,
}


@pytest.mark.nvcc
@pytest.mark.usefixtures("cache")
def test_the_real_compiler_takes_nothing_from_the_environment(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in _HOSTILE.items():
        monkeypatch.setenv(name, value(planted))
    (built,) = build([_ITEM])
    assert str(planted).encode() not in built.library.read_bytes()


@pytest.mark.nvcc
@pytest.mark.usefixtures("cache")
def test_the_real_compiler_uses_the_host_compiler_named(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = planted / "g++"
    host.write_text(f'#!/bin/sh\necho used >> {planted}/used\nexec /usr/bin/g++ "$@"\n')
    host.chmod(stat.S_IRWXU)
    monkeypatch.setenv("NVCC_CCBIN", str(host))
    build([_ITEM])
    assert (planted / "used").exists()
    host.write_text("#!/bin/sh\necho this compiler fails >&2\nexit 1\n")
    with pytest.raises(KernelBuildError, match="this compiler fails"):
        build([plan(Probe(waste=1))])


def test_a_cache_may_have_a_name_that_is_no_text(
    tmp_path: Path, nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Python makes of the bytes of "é" in Latin-1, and of those in UTF-8 in an ASCII locale.
    for name in ("caf\udce9", "caf\udcc3\udca9"):
        monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / name))
        (built,) = build([_ITEM])
        assert built.library.is_file()
        assert compiler.find(_ITEM) == built
        library = loader.load(Probe(), device=0, stream=0)
        assert library.path == str(built.library)
        monkeypatch.setattr(loader, "_loaded", {})
