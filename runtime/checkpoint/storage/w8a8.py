"""How a checkpoint stores a linear layer, and the name patterns that say which layers are meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .errors import CheckpointError


@dataclass(frozen=True)
class LinearScheme:
    """W8A8 storage of one linear layer.

    `dtype` of the weight is int8 or float8_e4m3fn; its scale is per output row (`per_channel`)
    or one for the tensor. Activations are quantised per token at run time, or with the file's
    `static_input` scale, and zero point unless `symmetric_input`.
    """

    dtype: torch.dtype
    per_channel: bool
    static_input: bool
    symmetric_input: bool = True


# Maps a module's name, such as "model.layers.0.mlp.up_proj", to its scheme; None: 16/32-bit.
SchemeOf = Callable[[str], LinearScheme | None]


def unquantized(_module: str) -> LinearScheme | None:
    """Return None: the scheme of every module of a plain checkpoint."""
    return None


def match_regex(pattern: str, text: str, where: str) -> bool:
    """Return whether `pattern` matches the beginning of `text`.

    Raises:
        CheckpointError: when the pattern is no regular expression.
    """
    try:
        return re.match(pattern, text) is not None
    except re.error as error:
        raise CheckpointError(f"{where}: {pattern!r} is no regular expression: {error}") from error
