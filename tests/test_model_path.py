"""What is said about paths that are no checkpoint's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ostinato.checkpoint import (
    CheckpointError,
    load_config,
    load_model,
    load_tokenizer,
    quantize_checkpoint,
)
from ostinato.cli.main import main
from ostinato.hub import is_hub_id
from ostinato.model_path import path_fault

_NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
_GGUF = "GGUF is not supported: expected the folder of a Hugging Face checkpoint"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of subprocesses


def _folder(path: Path, *files: str) -> str:
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"")
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B",
        "https://huggingface.co/meta-llama/Llama-3.1-8B",
        "https://huggingface.co/meta-llama/Llama-3.1-8B/tree/main",
        "https://hf.co/meta-llama/Llama-3.1-8B/",
        "hf://meta-llama/Llama-3.1-8B",
    ],
)
def test_a_name_on_the_hub_gets_the_command(name: str) -> None:
    fault = path_fault(name, "config.json")
    assert fault is not None
    assert fault.startswith(f"got {name!r}, which does not exist: expected the folder of a Hugging")
    assert "`hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B`" in fault
    assert "`huggingface-cli download`" in fault


@given(owner=_NAME, name=_NAME)
def test_any_such_name_does_or_is_gguf(owner: str, name: str) -> None:
    assume(is_hub_id(f"nowhere{owner}/{name}"))
    fault = path_fault(f"nowhere{owner}/{name}")
    assert fault is not None
    gguf = name.lower().endswith("gguf")
    assert (f"`hf download nowhere{owner}/{name} --local-dir {name}`" in fault) == (not gguf)
    assert ("GGUF" in fault.replace(name, "")) == gguf


@pytest.mark.parametrize(
    "path",
    ["", "gpt2", "./a/b", "../a/b", "/a/b", "~/a", "a/b/c", "a b/c", "a/$(x)", "a/b\n", "é/b"],
)
def test_other_paths_get_no_command(path: str) -> None:
    fault = path_fault(path, "config.json")
    assert fault is not None
    assert fault.startswith(f"got {path!r}")
    assert "`hf download" not in fault


@pytest.mark.parametrize("path", ["m.gguf", "a/m.Q4_K_M.GGUF", "org/Model-GGUF", "/x/m.gguf"])
def test_gguf_is_refused_by_name(path: str) -> None:
    assert path_fault(path, "config.json") == (
        f"got {path!r}, but {_GGUF}, with config.json and safetensors files"
    )


def test_gguf_is_refused_by_content(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF\3\0\0\0")
    assert _GGUF in str(path_fault(file))
    folder = _folder(tmp_path / "downloaded", "model.Q8_0.gguf", "README.md")
    assert _GGUF in str(path_fault(folder, "config.json"))
    assert path_fault(_folder(tmp_path / "of-gguf", "config.json", "m.gguf"), "config.json") is None


def test_a_folder_with_the_files_is_right(tmp_path: Path) -> None:
    for name in ("plain", "named-gguf", "größe"):
        folder = _folder(tmp_path / name, "config.json", "tokenizer.json")
        assert path_fault(folder, "config.json", "tokenizer.json") is None
        assert path_fault(Path(folder), "config.json") is None
    os.symlink(tmp_path / "plain", tmp_path / "link")
    assert path_fault("link", "config.json") is None


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "some", "config.json")
    fault = path_fault(folder, "config.json", "tokenizer.json")
    assert fault is not None
    assert fault.startswith(f"got {folder!r}, a folder without tokenizer.json: expected")


def test_a_hub_cache_names_its_snapshot(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    _folder(cache / "snapshots" / "abc", "config.json")
    fault = path_fault(cache, "config.json")
    assert fault is not None
    assert fault.endswith(f"expected its snapshot {cache}/snapshots/abc")


def test_files_and_what_is_below_them_are_no_folders(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    for path in (file, file / "x"):
        assert "which is no folder: expected" in str(path_fault(path))
    os.mkfifo(tmp_path / "pipe")
    assert "which is no folder: expected" in str(path_fault(tmp_path / "pipe"))
    assert "which cannot be read (File name too long)" in str(path_fault("x" * 5000))


def test_the_functions_of_python_say_it_too(tmp_path: Path) -> None:
    words = "got 'org/name', neither a path that exists here nor a model .*`hf download org/name"
    for load in (load_config, load_model, load_tokenizer):
        with pytest.raises(CheckpointError, match=f"path: {words}"):
            load("org/name")
    with pytest.raises(CheckpointError, match=f"src: {words}"):
        quantize_checkpoint("org/name", tmp_path / "new", scheme="int8")


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        ("generate {} x", "MODEL"),
        ("generate {} -", "MODEL"),
        ("quantize {} new --scheme int8", "SRC"),
        ("build --for-model {}", "--for-model"),
        ("tune --model {}", "--model"),
        ("bench step --model {}", "--model"),
    ],
)
@pytest.mark.parametrize("path", ["org/name", "model.gguf", "."])
def test_commands_say_it_in_one_line(
    path: str, command: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.format(path).split()
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"ostinato {words[0]}: error: {argument}: got {path!r}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        "generate org/name x",
        "generate model.gguf",
        "quantize org/name new --scheme int8",
        "build --for-model org/name",
        "build --help",
        "tune --model org/name",
        "bench step --model org/name",
        "kernels --budgets nowhere.json",
    ],
)
def test_torch_is_not_imported_before(arguments: str) -> None:
    code = (
        "import sys; from ostinato.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, *arguments.split()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
