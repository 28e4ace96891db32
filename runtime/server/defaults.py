"""Sampling defaults of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.errors import CheckpointError
from ..checkpoint.files import is_there
from ..checkpoint.section import Section
from ..engine import SamplingParams

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(folder: Path) -> dict[str, float | int]:
    """Return the sampling fields that `generation_config.json` sets; none without the file.

    Raises:
        CheckpointError: naming the file, when a field is malformed or out of range.
    """
    file = folder / _FILE
    if not is_there(file):
        return {}
    fields = Section.read(file).fields
    found = {name: fields[name] for name in _NAMES if fields.get(name) is not None}
    try:
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    return found
