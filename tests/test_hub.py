"""Models by their names on the Hugging Face Hub: the cache first, then a download. No network."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import filter_repo_objects
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.checkpoint import CheckpointError, load_config, load_model, load_tokenizer
from ostinato.cli.main import main
from ostinato.hub import is_hub_id
from ostinato.model_path import PathError, find_folder

NAME = "org/tiny"
TINY_LLAMA = Path(__file__).parents[1] / "examples" / "tiny-llama"
COMMIT = "a" * 40
HARMFUL = ("pytorch_model.bin", "modeling_tiny.py", "tokenizer.py", "model/model.safetensors.bin")


class Hub:
    """A repository and a cache; `ask` and `download` do what model_info and
    snapshot_download do, without network.
    """

    def __init__(self, root: Path) -> None:
        self.cache, self.files = root / "cache", dict[str, bytes]()
        self.commit, self.calls, self.reachable = COMMIT, list[str | None](), True
        self.got = set[str]()

    @property
    def repository(self) -> Path:
        return self.cache / repo_folder_name(repo_id=NAME, repo_type="model")

    def store(self, names: set[str] | None = None) -> Path:
        """Put files into the cache as the library lays them out: links to blobs."""
        folder = self.repository / "snapshots" / self.commit
        for name in self.files if names is None else names:
            blob, link = self.repository / "blobs" / f"{hash(name):x}", folder / name
            blob.parent.mkdir(parents=True, exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(self.files[name])
            if not link.is_symlink():
                link.symlink_to(os.path.relpath(blob, link.parent))
        (self.repository / "refs").mkdir(parents=True, exist_ok=True)
        (self.repository / "refs" / "main").write_text(self.commit)
        return folder

    def ask(self, repo_id: str, *, timeout: float) -> None:
        assert repo_id == NAME
        assert 0 < timeout < 60
        if not self.reachable:
            raise ConnectionError("no network\nsecond line")

    def download(
        self, repo_id: str, *, allow_patterns: list[str], revision: str | None = None
    ) -> str:
        assert repo_id == NAME
        self.calls.append(revision)
        names = set(filter_repo_objects(self.files, allow_patterns=allow_patterns))
        self.got |= names
        return str(self.store(names))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(made.cache))
    monkeypatch.setattr(huggingface_hub, "model_info", made.ask)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    made.files = {
        file.name: file.read_bytes() for file in TINY_LLAMA.iterdir() if file.is_file()
    } | dict.fromkeys(HARMFUL, b"harm")
    empty = tmp_path / "here"
    empty.mkdir()
    monkeypatch.chdir(empty)
    return made


def test_what_the_cache_holds_needs_no_network(hub: Hub) -> None:
    folder = hub.store()
    assert find_folder(NAME, "config.json", weights=True) == folder
    assert load_model(NAME).config == load_config(folder)
    assert load_tokenizer(NAME).get_vocab_size() > 0
    assert hub.calls == []


def test_the_rest_is_downloaded_of_one_revision(hub: Hub) -> None:
    model = load_model(NAME)
    assert model.config == load_config(TINY_LLAMA)
    assert hub.calls == [None, COMMIT]
    load_tokenizer(NAME)
    assert hub.calls == [None, COMMIT]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= hub.got
    assert not hub.got.intersection(HARMFUL)


def test_weights_are_downloaded_when_they_are_read(hub: Hub) -> None:
    load_tokenizer(NAME)
    load_config(NAME)
    assert hub.calls == [None]
    assert "model.safetensors" not in hub.got
    load_model(NAME)
    assert "model.safetensors" in hub.got


def _shard(hub: Hub, weight_map: Any) -> None:
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    hub.files["a-1.safetensors"] = hub.files.pop("model.safetensors")


def test_shards_are_those_that_the_index_names(hub: Hub) -> None:
    _shard(hub, {"x": "a-1.safetensors"})
    hub.files["consolidated.safetensors"] = b"not read"
    find_folder(NAME, "config.json", weights=True)
    assert "a-1.safetensors" in hub.got
    assert "consolidated.safetensors" not in hub.got


def test_a_cache_without_a_shard_is_completed(hub: Hub) -> None:
    _shard(hub, {"x": "a-1.safetensors"})
    hub.store({"config.json", "model.safetensors.index.json"})
    folder = find_folder(NAME, "config.json", weights=True)
    assert (folder / "a-1.safetensors").exists()
    (folder / "a-1.safetensors").resolve().unlink()  # a blob that is gone
    find_folder(NAME, "config.json", weights=True)
    assert hub.calls == [None, COMMIT, None, COMMIT]


@pytest.mark.parametrize(
    "weight_map",
    [{"x": "*"}, {"x": "pytorch_model.bin"}, {"x": "../x.safetensors"}, {"x": 1}, {"x": []}, 7],
)
def test_an_index_of_other_files_is_refused(hub: Hub, weight_map: Any) -> None:
    _shard(hub, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: got no index, expected one that"):
        load_model(NAME)
    assert not hub.got.intersection(HARMFUL)


def test_a_repository_without_safetensors_is_refused(hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors: expected a model with"):
        load_model(NAME)


def test_an_unreachable_name_says_what_to_do(hub: Hub) -> None:
    hub.reachable = False
    with pytest.raises(CheckpointError) as caught:
        load_model(NAME)
    words = str(caught.value)
    assert words.startswith(
        f"path: got '{NAME}', neither a path that exists here nor a model of the Hugging Face Hub "
        "that can be used: not in the cache and not to be downloaded (ConnectionError: no network)"
    )
    assert "check the path, or the name and the network" in words
    assert f"`hf download {NAME} --local-dir tiny`" in words


def test_a_network_without_answers_is_not_waited_for() -> None:
    """The library itself would wait for ever."""
    asks = (
        "from ostinato import hub; hub._SECONDS = 0.5; hub.hub_folder('a/b', ['x'], weights=False)"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": where, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", asks], env=environment, capture_output=True, timeout=60
        )
    last = done.stderr.decode().strip().splitlines()[-1]
    assert last.startswith("ostinato.hub.HubError: not in the cache and not to be downloaded (")
    assert "imeout" in last


def test_the_librarys_own_offline_mode_is_reported(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE=1 allows no download"):
        load_tokenizer(NAME)
    hub.store()
    load_tokenizer(NAME)


def test_without_the_library_it_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.store()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="is not installed: `pip install huggingface_hub`"):
        load_model(NAME)
    load_model(hub.store())


def test_a_folder_goes_before_a_name(hub: Hub) -> None:
    hub.store()
    shutil.copytree(TINY_LLAMA, NAME)
    assert find_folder(NAME, "config.json") == Path(NAME)
    Path(NAME, "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"a folder without config\.json"):
        load_model(NAME)
    shutil.rmtree(NAME)
    Path(NAME).write_text("a file")
    with pytest.raises(CheckpointError, match="which is no folder"):
        load_model(NAME)
    assert hub.calls == []


HOSTILE = [
    *("../x", "x/..", "a/b/c", "/a/b", "a//b", "a/b/", "./a", "a/.b", "-a/b", "a/-b", "~/b"),
    *("a/b\n", "a\x00/b", "a/\x1b[2J", "a/b c", "a/*", "é/b", "a/b\u202e", "a--b/c", "a/b..c"),
    *("a/b.git", "a/b.", "gpt2", "", "a/" + 95 * "b", "a/b@main", "a\\b/c", "a/b?x=1"),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_name_is_refused_by_name(hub: Hub, name: str) -> None:
    assert not is_hub_id(name)
    with pytest.raises(PathError) as caught:
        find_folder(name, "config.json")
    assert str(caught.value).startswith(f"got {name!r}")
    assert hub.calls == []


@example("_./_")
@given(st.text(st.sampled_from("ab.-_/ \n\0é"), max_size=9))
def test_names_stay_within_the_cache(text: str) -> None:
    if is_hub_id(text):
        huggingface_hub.utils.validate_repo_id(text)
        folder = repo_folder_name(repo_id=text, repo_type="model")
        assert Path(folder).name == folder
        assert text.count("/") == 1


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("generate {} x --max-tokens 2", 0, "captured on cpu"),
        # Which it is, and so it has been read.
        ("quantize {} new --scheme int8", 2, "the checkpoint is quantised already"),
    ],
)
def test_commands_take_a_name(
    hub: Hub, command: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.format(NAME).split()) == code
    assert words in capsys.readouterr().err
    assert hub.calls == [None, COMMIT]
