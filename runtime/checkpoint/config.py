"""Reads a model's shape from a checkpoint folder."""

from __future__ import annotations

import os
from dataclasses import replace

from ..models import ModelConfig, decoder_fields, family_of, read_config
from .files import is_there
from .folder import checkpoint_folder
from .reader import CheckpointReader, holds_weights
from .section import CONFIG_FILE, Section

_GENERATION_FILE = "generation_config.json"


def load_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read `config.json` of a checkpoint, and the end tokens of `generation_config.json`.

    `path` is a folder, or the name of a model on the Hugging Face Hub, as of `load_model`.

    Chat models list the token that ends a turn only in the second file, which need not exist. Where
    `config.json` has no dtype, it is that of the stored embedding, if there are weights.

    Raises:
        CheckpointError: when `path` is no folder with this file; naming the file, when it is no
            JSON object, or when the second file's end tokens are no tokens of the model.
        UnsupportedModelError: for an architecture or a field of `config.json` that is not
            implemented or malformed.
    """
    folder = checkpoint_folder("path", path, CONFIG_FILE)
    written = Section.read(folder / CONFIG_FILE)
    config = read_config(written.fields, written.where)
    fields = decoder_fields(written.fields, written.where)
    says = any(fields.get(name) is not None for name in ("dtype", "torch_dtype"))
    if not says and holds_weights(folder):
        with CheckpointReader(folder, text_tower=config.text_tower) as reader:
            reader.check_layers(config.num_layers)
            embedding = family_of(config).layout(config).embedding.spec
            config = replace(config, dtype=reader.dense_dtype(embedding) or config.dtype)
    generation = folder / _GENERATION_FILE
    if is_there(generation):
        end_tokens = Section.read(generation).integers(
            "eos_token_id", least=0, most=config.vocab_size - 1
        )
        return replace(config, eos_token_ids=end_tokens or config.eos_token_ids)
    return config
