"""The folder of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from ..model_path import path_fault
from .errors import CheckpointError


def checkpoint_folder(argument: str, path: str | os.PathLike[str], *files: str) -> Path:
    """Return the folder of a checkpoint.

    Args:
        argument: name of `path` for errors.
        path: the folder.
        files: names of files that it must hold.

    Raises:
        CheckpointError: when it is no folder or lacks a file. It says what to do about a name of
            the Hugging Face Hub.
    """
    fault = path_fault(path, *files)
    if fault is not None:
        raise CheckpointError(f"{argument}: {fault}")
    return Path(path)
