"""The folder of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from ..model_path import PathError, find_folder
from .errors import CheckpointError


def checkpoint_folder(
    argument: str, path: str | os.PathLike[str], *files: str, weights: bool = False
) -> Path:
    """Return the folder of a checkpoint; see `find_folder`.

    Args:
        argument: name of `path` for errors.
        path: the folder, or the name of a model on the Hugging Face Hub.
        files: names of files that it must hold, at least one.
        weights: whether a download from the Hub must include the weights.

    Raises:
        CheckpointError: when there is no such folder, or it lacks a file. It says what to do.
    """
    try:
        return find_folder(path, *files, weights=weights)
    except PathError as error:
        raise CheckpointError(f"{argument}: {error}") from error
