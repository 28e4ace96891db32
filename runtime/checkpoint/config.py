"""Reads a model's shape from a checkpoint folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ostinato.checkpoint.formats import CONFIG_FILE
from ostinato.checkpoint.section import Section
from ostinato.model import ModelConfig
from ostinato.model.config import token_ids

_GENERATION_FILE = "generation_config.json"


def load_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read `config.json` of a checkpoint folder, and the end tokens of `generation_config.json`.

    Chat models list the token that ends a turn only in the second file, which need not exist.

    Raises:
        CheckpointError: naming the file, when it is missing or no JSON object.
        UnsupportedModelError: for an architecture or a field that is not implemented.
    """
    folder = Path(path)
    config = ModelConfig.from_hf(Section.read(folder / CONFIG_FILE).fields)
    generation = folder / _GENERATION_FILE
    if generation.exists():
        end_tokens = token_ids(Section.read(generation).get("eos_token_id"))
        return replace(config, eos_token_ids=end_tokens or config.eos_token_ids)
    return config
