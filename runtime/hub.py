"""Finds checkpoints of the Hugging Face Hub by name: in its cache, else by downloading them.

It needs no torch, which takes seconds to import. The names of files come from strangers: only
listed ones are downloaded, none of which runs code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NAME = r"[A-Za-z0-9_](?:[\w-]|\.(?!\.))*"
_ID = re.compile(rf"{_NAME}/{_NAME}", re.ASCII)
_MOST_CHARACTERS = 96  # of a name on the Hub

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 100 << 20
_SECONDS = 10.0  # for the Hub's first answer
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)

# Everything that a folder is read for, or that a quantised copy takes along, but the weights.
_SMALL_FILES = (
    *("config.json", "generation_config.json", "hf_quant_config.json", _INDEX),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md"),
)


class HubError(Exception):
    """A name of the Hub cannot be used; the message says why and what to do."""


def is_hub_id(text: str) -> bool:
    """Return whether a text may be the name of a model on the Hub, "owner/name"."""
    parts = text.split("/")
    return (
        len(text) <= _MOST_CHARACTERS
        and _ID.fullmatch(text) is not None
        and "--" not in text
        and not text.endswith(".git")
        and not any(part.startswith((".", "-")) or part.endswith((".", "-")) for part in parts)
    )


def hub_folder(model: str, files: Sequence[str], *, weights: bool) -> Path:
    """Return the folder of a model of the Hub in the cache of huggingface_hub.

    Where the cache holds what is asked for, there is no access to the network. Otherwise the Hub
    must answer within ten seconds, and the newest revision is downloaded: configuration, tokenizer,
    chat templates and licence, and the safetensors files if they are asked for.

    Args:
        model: "owner/name"; see `is_hub_id`.
        files: which must be there.
        weights: whether the weights must be there.

    Raises:
        HubError: when huggingface_hub is not installed, or something is neither in the cache nor
            to be had.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise HubError(
            "huggingface_hub, which finds models by their names, is not installed: "
            f"`pip install huggingface_hub`, or download the model elsewhere{download_hint(model)}"
        ) from None
    folder = _cached(huggingface_hub, model, files)
    if folder is not None and not _missing(folder, files, weights):
        return folder
    try:
        # The library's own first request waits for ever on a network that swallows it.
        huggingface_hub.model_info(model, timeout=_SECONDS)
        folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=[*_SMALL_FILES]))
        if weights:
            # Of the same revision, though the repository may have a new one by now.
            wanted = _weight_files(folder)
            huggingface_hub.snapshot_download(
                model, revision=folder.name, allow_patterns=list(wanted)
            )
    except HubError:
        raise
    except Exception as error:  # of the HTTP client too, which differs between versions
        reason = next(iter(str(error).strip().splitlines()), "")
        raise HubError(
            f"not in the cache and not to be downloaded ({type(error).__name__}: {reason}): check "
            "the path, or the name and the network; gated models need `hf auth login`; "
            f"HF_HUB_OFFLINE=1 allows no download{download_hint(model)}"
        ) from error
    missing = _missing(folder, files, weights)
    if missing:
        raise HubError(
            f"{folder}, what the Hub or its cache has of it, lacks {missing[0]}: expected a model "
            f"with config.json and safetensors files; if the network was out of reach, try again"
        )
    return folder


def download_hint(model: str) -> str:
    """Return how to download a model of the Hub into a folder, as the end of a message."""
    return (
        f"; a model of the Hugging Face Hub is downloaded by `hf download {model} --local-dir "
        f"{model.partition('/')[2]}` (`huggingface-cli download` before huggingface_hub 1.0)"
    )


def _cached(library: Any, model: str, files: Sequence[str]) -> Path | None:
    """Return the newest folder of the cache that holds the first file, None without one."""
    found = library.try_to_load_from_cache(model, files[0])
    return Path(found).parent if isinstance(found, str) else None


def _missing(folder: Path, files: Sequence[str], weights: bool) -> list[str]:
    wanted = [*files, *(_weight_files(folder) if weights else ())]
    return [name for name in wanted if not (folder / name).exists()]


def _weight_files(folder: Path) -> Sequence[str]:
    """Return the names of the files that hold the weights.

    Raises:
        HubError: naming the index, when it is none or names other files.
    """
    index = folder / _INDEX
    if (folder / _WEIGHTS).exists() or not index.is_file():
        return (_WEIGHTS,)
    try:
        with open(index, "rb") as stream:
            text = stream.read(_MAX_INDEX_BYTES + 1)
        shards = sorted(set(json.loads(text)["weight_map"].values()))
        # They are patterns to the library: "*" would be every file.
        if len(text) <= _MAX_INDEX_BYTES and all(map(_SHARD.fullmatch, shards)):
            return shards
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    raise HubError(f"{index}: got no index, expected one that names safetensors files beside it")
