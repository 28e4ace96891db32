"""Reads the tokenizer of a checkpoint folder."""

from __future__ import annotations

import os

from tokenizers import Tokenizer

from .errors import CheckpointError
from .files import MAX_TOKENIZER_BYTES, read_text
from .folder import checkpoint_folder

_TOKENIZER_FILE = "tokenizer.json"


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read `tokenizer.json` of a checkpoint folder, or of a model on the Hugging Face Hub.

    Truncation and padding that were saved with it are switched off: they belong to training.

    Raises:
        CheckpointError: when `path` is no folder or name with this file, or it is too large or
            damaged. Folders that hold only a SentencePiece model (`tokenizer.model`) must be
            converted to `tokenizer.json` first.
    """
    file = checkpoint_folder("path", path, _TOKENIZER_FILE) / _TOKENIZER_FILE
    text = read_text(file, MAX_TOKENIZER_BYTES)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises this class itself
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
