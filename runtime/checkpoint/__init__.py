"""Hugging Face checkpoint folders: reading them into a model, and quantising them."""

from .config import load_config
from .errors import CheckpointError, UnsupportedCheckpointError
from .load import load_model
from .quantize import quantize_checkpoint
from .tokenizer import load_tokenizer

__all__ = [
    "CheckpointError",
    "UnsupportedCheckpointError",
    "load_config",
    "load_model",
    "load_tokenizer",
    "quantize_checkpoint",
]
