"""Reading tokenizer.json."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from ostinato.checkpoint import CheckpointError, load_tokenizer


def test_a_tokenizer_is_read(tmp_path: Path) -> None:
    vocabulary = {letter: index for index, letter in enumerate("abc")}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).encode("cab").ids == [2, 0, 1]


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=8, pad_id=1, pad_token="b")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("a" * 9).ids == [0] * 9
    assert loaded.encode("a").ids == [0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"path: got '.*', a folder without tokenizer\.json"),
        (b"{}", r"tokenizer\.json: not a tokenizer: "),
        (b"\xff\xff", r"tokenizer\.json: cannot be read: "),
    ],
)
def test_a_bad_tokenizer_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(tmp_path)
