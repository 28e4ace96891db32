"""The files beside the weights that a quantised folder takes along.

The source comes from a stranger, and the result may be published: what lies outside of the source
is not copied into it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from .errors import CheckpointError
from .files import MAX_TOKENIZER_BYTES, is_there, open_regular, unreadable

# What a runtime reads, and the terms under which the model may be passed on; in lower case. In
# place of one of these a folder is refused; one that only matches a pattern stays behind.
_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tekken.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.json",
        "chat_template.jinja",
        "generation_config.json",
        "license",
        "notice",
    }
)
_PATTERNS = (
    *("tokenizer*", "vocab.*", "chat_template*"),
    *("license*", "licence*", "copying*", "notice*", "use_policy*"),
)
_TEMPLATES = "additional_chat_templates"
_HUB_REPOSITORY = "models--*"


def find_companions(folder: Path) -> list[Path]:
    """Return the files of a source folder that are copied.

    Folders are not copied, other than the chat templates in `additional_chat_templates`.

    Raises:
        CheckpointError: naming the file, when one is no regular file, too large, or elsewhere.
    """
    try:
        found = [entry for entry in sorted(folder.iterdir()) if _is_companion(entry)]
        if is_there(folder / _TEMPLATES):
            templates = sorted((folder / _TEMPLATES).iterdir())
            found += [entry for entry in templates if entry.suffix == ".jinja"]
    except OSError as error:
        raise unreadable(error.filename, error) from error
    for file in found:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
        if size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(
                f"{file}: got {size} bytes, expected at most {MAX_TOKENIZER_BYTES}"
            )
    require_own(found, folder)
    return found


def copy_companions(files: Iterable[Path], source: Path, target: Path) -> None:
    """Copy files of `source`, with their places in it, to `target`; of links what they mean."""
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        with open_regular(file) as content, copy.open("wb") as stream:
            shutil.copyfileobj(content, stream)


def require_own(files: Iterable[Path], folder: Path) -> None:
    """Check that files are in a folder, links followed, or in the Hub's cache of its repository.

    A snapshot of the Hugging Face Hub, `models--X/snapshots/REVISION`, has links to
    `models--X/blobs`.

    Raises:
        CheckpointError: naming the file, when it is a link to somewhere else.
    """
    home = Path(os.path.realpath(folder))
    own = [home]
    for place in (home, *home.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and fnmatchcase(repository.name, _HUB_REPOSITORY):
            own.append(repository / "blobs")
    for file in files:
        real = Path(os.path.realpath(file))
        if not any(real.is_relative_to(place) for place in own):
            raise CheckpointError(
                f"{file}: is a link to {real}, outside of the folder; expected a file in the "
                "folder, since its contents go into the result"
            )


def _is_companion(entry: Path) -> bool:
    name = entry.name.lower()
    if name in _FILES:
        return True
    return any(fnmatchcase(name, pattern) for pattern in _PATTERNS) and not entry.is_dir()
