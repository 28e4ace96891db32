"""What others can change is not loaded: not even a library's constructor runs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_probe import Probe, fake_nvcc

from ostinato.cli.main import main
from ostinato.jit import cache as cache_module
from ostinato.jit import loader, ownership, toolchain
from ostinato.jit.cache import Entry, file_sha256
from ostinato.jit.compiler import build, find, plan
from ostinato.jit.errors import KernelCacheError, MissingKernelError

_OTHER = 65534
_PARTS = ["cache", "entry", "build.json", "kernel.so"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def _part(entry: Entry, name: str) -> Path:
    """Return the cache's folder, the entry's, or a file of the entry."""
    return {"cache": entry.folder.parent, "entry": entry.folder}.get(name, entry.folder / name)


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def built(nvcc_calls: Path) -> Entry:
    """Give an entry of a cache that only its owner can change."""
    (entry,) = build([plan(Probe())])
    return entry


def _plant(folder: Path, ran: Path) -> None:
    """Give a copy of the entry a library whose constructor makes the file `ran`."""
    source, library, record = ran.with_suffix(".c"), folder / "kernel.so", folder / "build.json"
    source.write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) static void run(void) {{ fclose(fopen("{ran}", "w")); }}\n'
    )
    before = file_sha256(library)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    record.write_text(record.read_text().replace(before, file_sha256(library)))
    assert Entry.read(folder) is not None


@pytest.fixture
def planted(tmp_path: Path, built: Entry) -> Path:
    """Replace the built library by one whose constructor makes a file; give that file."""
    ran = tmp_path / "ran"
    _plant(built.folder, ran)
    return ran


def test_a_planted_library_runs_where_nobody_else_could(built: Entry, planted: Path) -> None:
    # The control of the tests below: this library's code runs when it is loaded.
    with pytest.raises(RuntimeError, match="no symbol ostinato_fields"):
        loader.load(Probe(), device=0, stream=0)
    assert planted.exists()


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.parametrize("jit", ["0", "1"])
@needs_root
def test_what_belongs_to_another_user_is_not_loaded(
    jit: str, part: str, built: Entry, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_JIT", jit)
    path = _part(built, part)
    os.chown(path, _OTHER, _OTHER)
    with pytest.raises(KernelCacheError, match=r"belongs to .*65534.*OSTINATO_CACHE") as raised:
        loader.load(Probe(), device=0, stream=0)
    assert str(raised.value).startswith(f"{path}: ")
    assert f"chown -R 0 {built.folder.parent}" in str(raised.value)
    assert not planted.exists()


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.parametrize("bit", [0o020, 0o002, 0o1002], ids=["group", "others", "sticky"])
def test_what_others_can_write_is_not_loaded(
    bit: int, part: str, built: Entry, planted: Path
) -> None:
    path = _part(built, part)
    path.chmod(_mode(path) | bit)
    with pytest.raises(KernelCacheError, match=r"got mode .*OSTINATO_CACHE") as raised:
        loader.load(Probe(), device=0, stream=0)
    assert str(raised.value).startswith(f"{path}: ")
    assert f"chmod -R go-w {built.folder.parent}" in str(raised.value)
    assert not planted.exists()
    subprocess.run(["chmod", "-R", "go-w", built.folder.parent], check=True)
    assert find(plan(Probe())) is not None


@needs_root
def test_what_root_has_made_is_loaded_by_others(
    built: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.folder.parent.chmod(0o755)
    monkeypatch.setattr(ownership.os, "geteuid", lambda: _OTHER)
    assert find(plan(Probe())) == built
    os.chown(built.library, _OTHER, _OTHER)
    assert find(plan(Probe())) == built
    os.chown(built.library, 1000, 1000)
    with pytest.raises(KernelCacheError, match="belongs to"):
        find(plan(Probe()))


@pytest.mark.usefixtures("no_nvcc")
def test_a_cache_that_a_wheel_ships_is_loaded_without_a_write(
    tmp_path: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pip unpacks folders as 0755 and files as 0644, with no more of a cache than its entries.
    shipped, unpacked = tmp_path / "shipped", tmp_path / "site" / "kernels"
    with monkeypatch.context() as builder:
        fake_nvcc(tmp_path / "cuda", recorder)
        builder.setattr(toolchain, "_nvcc_path", lambda: tmp_path / "cuda" / "bin" / "nvcc")
        builder.setenv("OSTINATO_CACHE", str(shipped))
        (built,) = build([plan(Probe())])
    inside = unpacked / built.folder.name
    inside.mkdir(parents=True, mode=0o755)
    for name in ("build.json", "kernel.so"):
        (inside / name).write_bytes((built.folder / name).read_bytes())
        (inside / name).chmod(0o644)
    before = sorted(unpacked.rglob("*"))
    monkeypatch.setenv("OSTINATO_CACHE", str(unpacked))
    loader.load(Probe(), device=0, stream=0)
    assert sorted(unpacked.rglob("*")) == before


@needs_root
def test_root_does_not_load_what_a_user_has_made(built: Entry) -> None:
    for path in (built.folder.parent, *built.folder.parent.rglob("*")):
        os.chown(path, 1000, 1000)
    with pytest.raises(KernelCacheError, match="belongs to"):
        find(plan(Probe()))


@pytest.mark.parametrize("command", ["build --only embed-bf16", "kernels"])
def test_commands_refuse_such_a_cache(
    command: str, nvcc_calls: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--only", "embed-bf16"]) == 0
    cache.chmod(0o777)
    capsys.readouterr()
    assert main(command.split()) == 1
    assert f"error: {cache}: got mode 0777" in capsys.readouterr().err


def test_nothing_is_built_into_such_a_cache(cache: Path, nvcc_calls: Path) -> None:
    cache.mkdir()
    cache.chmod(0o770)
    with pytest.raises(KernelCacheError, match="got mode 0770"):
        build([plan(Probe())])
    assert list(cache.iterdir()) == []
    assert not nvcc_calls.exists()


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_a_cache_is_its_owners_whatever_the_umask(mask: int, cache: Path, nvcc_calls: Path) -> None:
    with _umask(mask):
        (built,) = build([plan(Probe())])
    assert _mode(cache) == 0o700
    for path in (built.folder, *built.folder.iterdir()):
        assert _mode(path) & (0o022 | mask) == 0
    assert find(plan(Probe())) == built


def test_a_cache_may_be_a_link(
    tmp_path: Path, built: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(built.folder.parent)
    monkeypatch.setenv("OSTINATO_CACHE", str(link))
    assert find(plan(Probe())) is not None
    loader.load(Probe(), device=0, stream=0)
    built.folder.parent.chmod(0o777)
    with pytest.raises(KernelCacheError, match="got mode 0777"):
        find(plan(Probe()))


@pytest.mark.parametrize("part", _PARTS[1:])
def test_links_in_a_cache_count_as_damaged(
    part: str, tmp_path: Path, built: Entry, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = _part(built, part), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert find(plan(Probe())) is None
    monkeypatch.setenv("OSTINATO_JIT", "0")
    with pytest.raises(MissingKernelError, match=rf"damaged in .*{built.folder.name}"):
        loader.load(Probe(), device=0, stream=0)
    assert not planted.exists()
    (again,) = build([plan(Probe())])
    assert not _part(again, part).is_symlink()


@pytest.mark.parametrize("part", ["build.json", "kernel.so"])
def test_a_pipe_in_an_entry_holds_nothing_up(part: str, built: Entry) -> None:
    path = _part(built, part)
    path.unlink()
    os.mkfifo(path)
    assert find(plan(Probe())) is None
    assert build([plan(Probe())])


def test_what_is_loaded_is_what_was_checked(
    tmp_path: Path, built: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody who may write to the folder that holds the cache replaces it after the check.
    ran, checked = tmp_path / "ran", tmp_path / "checked"
    others = shutil.copytree(built.folder.parent, tmp_path / "others")
    _plant(others / built.folder.name, ran)
    (others / built.folder.name / "kernel.so").chmod(0o777)
    read = Entry.read

    def replace_after(folder: Path) -> Entry | None:
        entry = read(folder)
        if not checked.exists():
            folder.parent.rename(checked)
            others.rename(folder.parent)
        return entry

    monkeypatch.setattr(Entry, "read", staticmethod(replace_after))
    with pytest.raises(KernelCacheError, match="got mode 0777"):
        loader.load(Probe(), device=0, stream=0)
    assert not ran.exists()


def test_a_folder_moved_after_the_check_is_still_loaded(
    tmp_path: Path, built: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = cache_module.pinned_library

    def replace_after(entry: Entry) -> str:
        name = pinned(entry)
        entry.folder.parent.rename(tmp_path / "checked")
        return name

    monkeypatch.setattr(loader, "pinned_library", replace_after)
    library = loader.load(Probe(), device=0, stream=0)
    assert library.path == str(built.library)  # its name in errors


def test_each_cache_gives_its_own_library(
    built: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # dlopen knows libraries by name: two caches of one process have equal entries, not equal names.
    names = [cache_module.pinned_library(built)]
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "second"))
    names.append(cache_module.pinned_library(build([plan(Probe())])[0]))
    assert len(set(names)) == 2
    assert [Path(name).read_bytes() for name in names] == [built.library.read_bytes()] * 2


@pytest.mark.parametrize("taken", ["free", "another file", "the next to be opened"])
def test_a_closed_descriptor_is_opened_again(taken: str, built: Entry) -> None:
    # Daemons close all descriptors.
    held = int(cache_module.pinned_library(built).split("/")[4])
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    os.close(held)
    below = [os.open("/", os.O_RDONLY) for _ in range(held - lowest) if taken != "free"]
    others = [*below, os.open("/", os.O_RDONLY)] if taken == "another file" else below
    try:
        assert Path(cache_module.pinned_library(built)).read_bytes() == built.library.read_bytes()
    finally:
        for other in others:
            os.close(other)


@given(mode=st.integers(0, 0o7777))
def test_any_mode_that_lets_others_write_is_refused(
    mode: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mode") / "cache"
    folder.mkdir()
    folder.chmod(mode | 0o500)
    refused = pytest.raises(KernelCacheError) if mode & 0o022 else nullcontext()
    with refused, ownership.opened(folder):
        pass
