"""Damaged entries of the cache count as absent: they are compiled again, or refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_probe import Probe, fake_nvcc

from ostinato.jit import loader
from ostinato.jit.budgets import Usage
from ostinato.jit.cache import Entry, exclusive_build, file_sha256, publish
from ostinato.jit.compiler import build, find, plan
from ostinato.jit.errors import KernelBuildError, MissingKernelError

_ITEM = plan(Probe())


def _flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def _truncate(entry: Entry) -> None:
    os.truncate(entry.library, 100)


def _lose_library(entry: Entry) -> None:
    entry.library.unlink()


def _flip_a_bit(entry: Entry) -> None:
    _flip(entry.library, entry.library.stat().st_size // 2)


def _tear(entry: Entry) -> None:
    # A write that was torn by a crash: the right size, and zeros where a block is missing.
    with open(entry.library, "r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))


def _lose_record(entry: Entry) -> None:
    _record(entry).unlink()


def _empty_record(entry: Entry) -> None:
    os.truncate(_record(entry), 0)


def _foreign_record(entry: Entry) -> None:
    _record(entry).write_text("[]")


def _deep_record(entry: Entry) -> None:
    _record(entry).write_text("[" * 100_000)


def _binary_record(entry: Entry) -> None:
    _record(entry).write_bytes(b"\xff\xfe\0")


def _long_record(entry: Entry) -> None:
    _record(entry).write_text(" " * (1 << 20) + _record(entry).read_text())


def _changed(**fields: Any) -> Callable[[Entry], None]:
    def change(entry: Entry) -> None:
        _record(entry).write_text(json.dumps({**json.loads(_record(entry).read_text()), **fields}))

    return change


def _record(entry: Entry) -> Path:
    return entry.folder / "build.json"


_DAMAGES = {
    "truncated": _truncate,
    "no library": _lose_library,
    "a bit": _flip_a_bit,
    "torn": _tear,
    "no record": _lose_record,
    "empty record": _empty_record,
    "foreign record": _foreign_record,
    "deep record": _deep_record,
    "binary record": _binary_record,
    "long record": _long_record,
    "no hash": _changed(sha256=None),
    "another hash": _changed(sha256="0" * 64),
    "seconds": _changed(seconds="many"),
    "variant": _changed(variant=["probe"]),
    "usage": _changed(usage={"registers": 1}),
    "more fields": _changed(size=1),
}


@pytest.mark.parametrize("damage", _DAMAGES.values(), ids=_DAMAGES)
def test_a_damaged_library_is_compiled_again(
    damage: Callable[[Entry], None],
    cache: Path,
    nvcc_calls: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (built,) = build([_ITEM])
    whole = built.library.read_bytes()
    damage(built)
    assert find(_ITEM) is None
    loader.load(Probe(), device=0, stream=0)
    assert capfd.readouterr().err == (
        f"ostinato: compiling kernel {Probe().name} once, into {cache}, since it is damaged in "
        f"{built.folder}\n"
    )
    again = find(_ITEM)
    assert again is not None
    assert again.library.read_bytes() == whole
    assert len(nvcc_calls.read_text().splitlines()) == 2
    assert not list(cache.glob("unfinished-*"))


@pytest.mark.parametrize("damage", [_flip_a_bit, _deep_record])
def test_without_jit_a_damaged_library_is_refused_by_name(
    damage: Callable[[Entry], None], nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built,) = build([_ITEM])
    damage(built)
    monkeypatch.setenv("OSTINATO_JIT", "0")
    words = rf"{Probe().name} \(release\) is damaged in {re.escape(str(built.folder))} and OSTI"
    with pytest.raises(MissingKernelError, match=words):
        loader.load(Probe(), device=0, stream=0)


def test_without_nvcc_a_damaged_library_hides_no_whole_one(
    tmp_path: Path,
    nvcc_calls: Path,
    recorder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    (whole,) = build([_ITEM])
    fake_nvcc(tmp_path / "newer", recorder, version="13.1.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "newer"))
    (newer,) = build([_ITEM])
    _flip_a_bit(newer)
    request.getfixturevalue("no_nvcc")
    assert find(_ITEM) == whole


def test_what_is_no_entry_counts_as_none_and_is_replaced(
    cache: Path, nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built,) = build([_ITEM])
    shutil.rmtree(built.folder)
    built.folder.write_text("a file")
    assert Entry.read(built.folder) is None
    (cache / f"{_ITEM.key}-nvcc9.9.9").symlink_to(cache / "nowhere")
    monkeypatch.setenv("OSTINATO_JIT", "0")
    assert find(_ITEM) is None
    (again,) = build([_ITEM])
    assert again.library.is_file()
    assert find(_ITEM) == again


def test_a_compiler_that_fails_leaves_a_damaged_library_refused(
    nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built,) = build([_ITEM])
    _flip_a_bit(built)
    script = nvcc_calls.parent / "bin" / "nvcc"
    script.write_text(script.read_text().replace("cp ", "exit 1; cp "))
    with pytest.raises(KernelBuildError, match=Probe().name):
        loader.load(Probe(), device=0, stream=0)
    assert find(_ITEM) is None


@given(content=st.binary(min_size=1, max_size=300), data=st.data())
def test_any_changed_byte_is_noticed(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("changed") / "cache"
    with exclusive_build(cache) as folder:
        library = folder / "built" / "kernel.so"
        library.parent.mkdir()
        library.write_bytes(content)
        texts = {"variant": "probe", "target": "sm_90a", "mode": "release", "nvcc": "13.0.88"}
        entry = Entry(
            cache / "entry",
            **texts,
            seconds=1.0,
            sha256=file_sha256(library),
            usage=Usage(1, 0, 0, 0),
        )
        publish(entry, library)
    assert Entry.read(entry.folder) == entry
    _flip(entry.library, data.draw(st.integers(0, len(content) - 1)))
    assert Entry.read(entry.folder) is None
