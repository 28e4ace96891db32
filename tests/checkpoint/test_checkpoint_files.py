"""What may stand in a folder in place of a file: only regular files of bounded size are read."""

from __future__ import annotations

import json
import os
import re
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hf_models import MODELS, config_of, random_model, save, save_plain, tensors_of

from ostinato.checkpoint import (
    CheckpointError,
    load_config,
    load_model,
    load_tokenizer,
    quantize_checkpoint,
)
from ostinato.checkpoint import files as checkpoint_files
from ostinato.cli.main import main
from tiny import byte_tokenizer

pytestmark = pytest.mark.timeout(60)


def _socket(path: Path) -> None:
    # The address of a socket is short; that of a temporary folder need not be.
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


# What stands there, and what the message says of it.
STAND_INS: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (os.mkfifo, "got a FIFO, expected a regular file"),
    "folder": (Path.mkdir, "got a folder, expected a regular file"),
    "socket": (_socket, "got a socket, expected a regular file"),
    "device": (_link("/dev/zero"), "got a device, expected a regular file"),
    "terminal": (_link("/dev/tty"), "got a device, expected a regular file"),
    "dangling": (_link("nowhere"), "cannot be read: .*No such file"),
    "circle": (lambda path: path.symlink_to(path.name), "cannot be read: .*symbolic links"),
}

Folder = Callable[[str], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Make a folder that loads, and takes one of its files away."""

    def make(name: str) -> Path:
        model = random_model(MODELS["llama"])
        if "index" in name or "-of-" in name:
            tensors = list(tensors_of(model).items())
            save(tmp_path / "m", config_of(model), dict(tensors[:9]), dict(tensors[9:]))
        else:
            save_plain(tmp_path / "m", model)
        byte_tokenizer().save(str(tmp_path / "m" / "tokenizer.json"))
        (tmp_path / "m" / "generation_config.json").write_text("{}")
        (tmp_path / "m" / name).unlink(missing_ok=True)
        return tmp_path / "m"

    return make


READ = {
    "config.json": load_model,
    "generation_config.json": load_model,
    "hf_quant_config.json": load_model,
    "model.safetensors": load_model,
    "model.safetensors.index.json": load_model,
    "model-00002-of-00002.safetensors": load_model,
    "tokenizer.json": load_tokenizer,
}


@pytest.mark.parametrize("kind", STAND_INS)
@pytest.mark.parametrize("name", READ)
def test_what_is_no_regular_file_is_named(name: str, kind: str, folder: Folder) -> None:
    """Port of sec_04."""
    path = folder(name) / name
    make, words = STAND_INS[kind]
    make(path)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: {words}"):
        READ[name](path.parent)


COPIED = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "LICENSE",
    "config.json",
    "model.safetensors",
]


@pytest.mark.parametrize("kind", STAND_INS)
@pytest.mark.parametrize("name", COPIED)
def test_the_quantiser_copies_regular_files_only(
    name: str, kind: str, folder: Folder, tmp_path: Path
) -> None:
    path = folder(name) / name
    make, words = STAND_INS[kind]
    make(path)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: {words}"):
        quantize_checkpoint(path.parent, tmp_path / "out", scheme="int8", progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_an_endless_file_is_read_to_its_limit_only(
    name: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(name) / name
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # a hole: no space on the disk
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r": got more than \d+ MiB, expected at most"):
        READ[name](path.parent)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20, "nothing is read of such a file"
    tracemalloc.stop()


def test_a_file_that_grows_while_it_is_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of /proc say that they are empty.
    maps = Path("/proc/self/maps")
    assert checkpoint_files.read_bytes(maps, 1 << 20)
    with pytest.raises(CheckpointError, match=r"^/proc/self/maps: got more than 1 KiB"):
        checkpoint_files.read_bytes(maps, 1 << 10)


def test_shards_that_are_one_file_are_refused_at_the_second(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("model.safetensors.index.json") / "model.safetensors.index.json"
    first = path.with_name("model-00001-of-00002.safetensors")
    read: list[Path] = []
    from ostinato.checkpoint import reader

    def read_header(file: Path, header=reader.read_header) -> object:  # type: ignore[no-untyped-def]
        read.append(file)
        return header(file)

    monkeypatch.setattr(reader, "read_header", read_header)
    names = list(reader.read_header(first))
    weight_map = {}
    for index in range(500):
        path.with_name(f"{index}.safetensors").hardlink_to(first)
        weight_map[f"{index}.weight"] = f"{index}.safetensors"
    weight_map.update(dict.fromkeys(names, first.name))
    path.write_text(json.dumps({"weight_map": weight_map}))
    read.clear()
    with pytest.raises(CheckpointError, match=r"is not listed for this file|missing 0\.weight"):
        load_model(path.parent)
    assert len(read) <= 2


def test_a_fifo_is_one_line_of_the_command(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder("config.json") / "config.json"
    os.mkfifo(path)
    assert main(["generate", str(path.parent), "Hello"]) == 2
    assert capsys.readouterr().err == (
        f"ostinato generate: error: {path}: got a FIFO, expected a regular file\n"
    )


def test_links_to_regular_files_are_read(folder: Folder, tmp_path: Path) -> None:
    source = folder("nothing")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in source.iterdir():
        (linked / file.name).symlink_to(file)
    assert load_config(linked) == load_config(source)
    load_model(linked)
    load_tokenizer(linked)
