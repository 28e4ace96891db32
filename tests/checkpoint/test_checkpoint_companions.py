"""Which files go along with the weights into a quantised folder, and which links are followed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from hf_models import MODELS, config_of, random_model, save, save_plain, tensors_of
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ostinato.checkpoint import CheckpointError, load_model, load_tokenizer, quantize_checkpoint
from tiny import byte_tokenizer

LINKS_OUT = r": is a link to {}, outside of the folder; expected a file in the folder"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return save_plain(tmp_path / "src", random_model(MODELS["llama"]))


def quantized(src: Path, tmp_path: Path) -> Path:
    target = tmp_path / "out"
    quantize_checkpoint(src, target, scheme="int8", progress=False)
    return target


def test_all_chat_templates_go_along(src: Path, tmp_path: Path) -> None:
    """Port of bug_11: transformers 5 has further templates in a folder."""
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    fast.chat_template = templates
    fast.save_pretrained(src)
    out = quantized(src, tmp_path)
    assert AutoTokenizer.from_pretrained(out).chat_template == templates
    names = sorted(file.name for file in (out / "additional_chat_templates").iterdir())
    assert names == ["rag.jinja", "tool_use.jinja"]


def test_what_transformers_saves_of_a_tokenizer_goes_along(src: Path, tmp_path: Path) -> None:
    before = set(src.iterdir())
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(src)
    saved = {file.name for file in set(src.iterdir()) - before}
    assert "tokenizer.json" in saved
    assert saved <= {file.name for file in quantized(src, tmp_path).iterdir()}


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.model.v3",
        "tekken.json",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "special_tokens_map.json",
        "chat_template.json",
        "generation_config.json",
        "LICENSE-MODEL",
        "LICENCE",
        "license.txt",
        "Notice",
        "COPYING",
        "USE_POLICY.md",
    ],
)
def test_files_of_tokenizers_and_terms_go_along(name: str, src: Path, tmp_path: Path) -> None:
    (src / name).write_text("{}")
    assert (quantized(src, tmp_path) / name).read_text() == "{}"


def test_folders_of_similar_names_stay_behind(src: Path, tmp_path: Path) -> None:
    for name in ("LICENSES", "tokenizer_old", "additional_chat_templates"):
        (src / name).mkdir()
        (src / name / "notes.txt").write_text("x")
    assert {file.name for file in quantized(src, tmp_path).iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_a_file_called_like_the_folder_of_templates_is_named(src: Path, tmp_path: Path) -> None:
    os.mkfifo(src / "additional_chat_templates")
    with pytest.raises(CheckpointError, match="additional_chat_templates: cannot be read"):
        quantized(src, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "LICENSE-x",
        "tokenizer.json",
        "generation_config.json",
        "config.json",
        "model.safetensors",
        "additional_chat_templates/a.jinja",
    ],
)
@pytest.mark.parametrize("chain", [False, True])
def test_links_out_of_the_folder_are_refused(
    name: str, chain: bool, src: Path, tmp_path: Path
) -> None:
    """Port of sec_18: such a link can name a file that the user would not publish."""
    secret = tmp_path / "secret"
    (src / "additional_chat_templates").mkdir()
    if (src / name).exists():
        (src / name).rename(secret)
    else:
        secret.write_text("{}")
    if chain:
        (src / "middle").symlink_to(secret)
        (src / name).symlink_to(src / "middle")
    else:
        (src / name).symlink_to(secret)
    words = re.escape(str(src / name)) + LINKS_OUT.format(re.escape(str(secret)))
    with pytest.raises(CheckpointError, match=words):
        quantized(src, tmp_path)
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 2, "nothing is left"


def test_a_linked_folder_of_templates_is_refused(src: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jinja").write_text("secret")
    (src / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"a\.jinja: is a link to .*outside"):
        quantized(src, tmp_path)


def test_links_within_the_folder_are_followed(src: Path, tmp_path: Path) -> None:
    (src / "data").mkdir()
    (src / "model.safetensors").rename(src / "data" / "weights")
    (src / "model.safetensors").symlink_to("data/weights")
    (src / "data" / "terms").write_text("terms")
    (src / "LICENSE").symlink_to("data/terms")
    linked = tmp_path / "linked"
    linked.symlink_to(src)
    out = quantized(linked, tmp_path)
    assert (out / "LICENSE").read_text() == "terms"
    assert not (out / "LICENSE").is_symlink()


def snapshot(tmp_path: Path) -> Path:
    """Return a folder as huggingface_hub downloads it: all files are links to ../../blobs."""
    repo = tmp_path / "hub" / "models--somebody--model"
    folder = repo / "snapshots" / "0123abcd"
    model = random_model(MODELS["llama"])
    tensors = list(tensors_of(model).items())
    folder.mkdir(parents=True)
    (repo / "blobs").mkdir()
    save(folder, config_of(model), dict(tensors[:9]), dict(tensors[9:]))
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    fast.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    fast.save_pretrained(folder)
    (folder / "LICENSE").write_text("terms")
    files = [path for path in folder.rglob("*") if path.is_file()]
    for index, file in enumerate(files):
        blob = repo / "blobs" / f"{index:064x}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    return folder


def test_snapshots_of_the_hub_are_loaded_and_quantised(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    load_model(folder)
    load_tokenizer(folder)
    out = quantized(folder, tmp_path)
    assert (out / "LICENSE").read_text() == "terms"
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert not any(path.is_symlink() for path in out.rglob("*"))
    load_model(out)


def test_a_snapshot_in_a_linked_cache_is_quantised(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    (tmp_path / "cache").symlink_to(tmp_path / "hub")
    quantized(tmp_path / "cache" / folder.relative_to(tmp_path / "hub"), tmp_path)


def test_a_link_out_of_the_hubs_cache_is_refused(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    (tmp_path / "secret").write_text("secret")
    blob = (folder / "LICENSE").resolve()
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"LICENSE: is a link to .*secret, outside"):
        quantized(folder, tmp_path)


def test_a_cache_whose_blobs_are_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    blobs = folder.parents[1] / "blobs"
    blobs.rename(tmp_path / "private")
    blobs.symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=r"is a link to .*private.*, outside"):
        quantized(folder, tmp_path)


def test_a_folder_that_only_looks_like_a_snapshot_is_refused(src: Path, tmp_path: Path) -> None:
    (tmp_path / "x" / "snapshots").mkdir(parents=True)
    (tmp_path / "x" / "blobs").mkdir()
    (tmp_path / "x" / "blobs" / "key").write_text("secret")
    folder = src.rename(tmp_path / "x" / "snapshots" / "rev")
    (folder / "LICENSE").symlink_to("../../blobs/key")
    with pytest.raises(CheckpointError, match=r"LICENSE: is a link to .*outside"):
        quantized(folder, tmp_path)


def test_a_full_disk_is_no_fault_of_the_source(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (src / "LICENSE").write_text("terms")
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left") as caught:
        quantized(src, tmp_path)
    assert caught.value.errno == errno.ENOSPC
