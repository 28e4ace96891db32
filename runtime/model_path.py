"""Finds the folder that a path or a name on the Hub means, or says why there is none.

It needs no torch, which takes seconds to import.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .hub import HubError, download_hint, hub_folder, is_hub_id

CHECKPOINT = "the folder of a Hugging Face checkpoint, with config.json and safetensors files"
# The page of a model.
_PAGE = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)([^/]+/[^/]+)(?:/tree/main)?/?"
)


class PathError(ValueError):
    """A path is not that of a checkpoint's folder, nor the name of one on the Hub."""


def find_folder(path: str | os.PathLike[str], *files: str, weights: bool = False) -> Path:
    """Return the folder of a checkpoint.

    What exists on this machine goes before a model of the Hub of the same name. A name of the Hub
    is looked up in the cache of huggingface_hub, and downloaded when it is not there.

    Args:
        path: the folder, or the name of a model on the Hub, "owner/name".
        files: names of files that it must hold, at least one.
        weights: whether a download from the Hub must include the weights.

    Raises:
        PathError: saying what was got and expected, when there is no such folder, or it lacks a
            file, or a name of the Hub is neither in the cache nor to be downloaded.
    """
    text = os.fspath(path)
    if is_hub_id(text) and not _is_named_gguf(text) and not os.path.lexists(text):
        try:
            return hub_folder(text, files, weights=weights)
        except HubError as error:
            raise PathError(
                f"got {text!r}, neither a path that exists here nor a model of the Hugging Face "
                f"Hub that can be used: {error}"
            ) from error
    fault = path_fault(path, *files)
    if fault is not None:
        raise PathError(fault)
    return Path(path)


def path_fault(path: str | os.PathLike[str], *files: str) -> str | None:
    """Return what is wrong with a checkpoint's path, as "got ..., expected ..."; None for nothing.

    Args:
        path: of the folder.
        files: names of files that it must hold.
    """
    text, folder = os.fspath(path), Path(path)
    found = f"got {text!r}"
    gguf = f"{found}, but GGUF is not supported: expected {CHECKPOINT}"
    named_gguf = _is_named_gguf(text)
    if not text:
        return f"{found}, expected {CHECKPOINT}"
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        missing = f"{found}, which does not exist: expected {CHECKPOINT}{_download(text)}"
        return gguf if named_gguf else missing
    except NotADirectoryError:
        is_gguf = named_gguf or _is_gguf(folder)
        return gguf if is_gguf else f"{found}, which is no folder: expected {CHECKPOINT}"
    except (OSError, ValueError) as error:  # ValueError of a NUL
        reason = getattr(error, "strerror", None) or error
        return f"{found}, which cannot be read ({reason}): expected {CHECKPOINT}"
    lacking = [name for name in files if name not in names]
    if not lacking:
        return None
    if any(name.lower().endswith(".gguf") for name in names):
        return gguf
    revisions = sorted(folder.glob("snapshots/*")) if "snapshots" in names else []
    if revisions:
        return f"{found}, a cache of the Hugging Face Hub: expected its snapshot {revisions[0]}"
    return f"{found}, a folder without {lacking[0]}: expected {CHECKPOINT}"


def _download(text: str) -> str:
    """Return how to download what a text names on the Hub, if it may be a name there."""
    page = _PAGE.fullmatch(text)
    name = text if page is None else page[1]
    if is_hub_id(name):
        return download_hint(name)
    return ", or the name of one on the Hugging Face Hub, such as Qwen/Qwen3-8B"


def _is_named_gguf(text: str) -> bool:
    return text.lower().rstrip("/").endswith("gguf")


def _is_gguf(file: Path) -> bool:
    """Return whether a file begins as GGUF files do, whatever its name."""
    if not file.is_file():
        return False
    try:
        with open(file, "rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False
