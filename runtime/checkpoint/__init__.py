"""Hugging Face checkpoint folders: reading them into a model, and quantising them."""

from ostinato.checkpoint.config import load_config
from ostinato.checkpoint.errors import CheckpointError, UnsupportedCheckpointError
from ostinato.checkpoint.load import load_model
from ostinato.checkpoint.quantize import quantize_checkpoint
from ostinato.checkpoint.tokenizer import load_tokenizer

__all__ = [
    "CheckpointError",
    "UnsupportedCheckpointError",
    "load_config",
    "load_model",
    "load_tokenizer",
    "quantize_checkpoint",
]
