"""Says why a path is not that of a checkpoint's folder; needs no torch, which takes seconds."""

from __future__ import annotations

import os
import re
from pathlib import Path

CHECKPOINT = "the folder of a Hugging Face checkpoint, with config.json and safetensors files"
# An owner and a name, or their page.
_PAGE = r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)"
_HUB = re.compile(rf"(?:{_PAGE})?(\w[\w.-]*)/(\w[\w.-]*)(?:/tree/main)?/?", re.ASCII)


def path_fault(path: str | os.PathLike[str], *files: str) -> str | None:
    """Return what is wrong with a checkpoint's path, as "got ..., expected ..."; None for nothing.

    Args:
        path: of the folder.
        files: names of files that it must hold.
    """
    text, folder = os.fspath(path), Path(path)
    found = f"got {text!r}"
    gguf = f"{found}, but GGUF is not supported: expected {CHECKPOINT}"
    named_gguf = text.lower().rstrip("/").endswith("gguf")
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
    except OSError as error:
        return f"{found}, which cannot be read ({error.strerror}): expected {CHECKPOINT}"
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
    name = _HUB.fullmatch(text)
    if name is None:
        return ""
    model = f"{name[1]}/{name[2]} --local-dir {name[2]}"
    return (
        f"; a model of the Hugging Face Hub is downloaded by `hf download {model}` "
        "(`huggingface-cli download` before huggingface_hub 1.0)"
    )


def _is_gguf(file: Path) -> bool:
    """Return whether a file begins as GGUF files do, whatever its name."""
    if not file.is_file():
        return False
    try:
        with open(file, "rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False
