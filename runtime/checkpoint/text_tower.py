"""Names of tensors and modules in a checkpoint that holds a text tower beside others.

Families name their tensors as in a checkpoint of their own: "model.layers.0…", "lm_head.weight".
transformers has called the same tensors "language_model.model.layers.0…" and, since its version
4.52, "model.language_model.layers.0…"; Qwen2-VL's files have no prefix at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .errors import CheckpointError
from .header import StoredTensor

# How each layout begins names that families begin otherwise.
_LAYOUTS: tuple[dict[str, str], ...] = (
    {"model.": "model.language_model."},
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)
# Whatever begins so is of the text tower, or it is an error.
_TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "language_model.")


def family_name(stored: str) -> str | None:
    """Return what families call a tensor of the text tower; None for one of another tower."""
    for layout in _LAYOUTS:
        for ours, theirs in layout.items():
            if stored.startswith(theirs):
                return ours + stored.removeprefix(theirs)
    return stored if stored.startswith(_TEXT) else None


def spellings(name: str) -> tuple[str, ...]:
    """Return all names that a tensor or module of a family has in one layout or another."""
    return (name, *(_spelt(name, layout) for layout in _LAYOUTS))


def stored_name(name: str, stored: Iterable[str]) -> str:
    """Return what a file with such other names would call a tensor of a family."""
    for other in stored:
        for layout in _LAYOUTS:
            if other.startswith(layout["model."]):
                return _spelt(name, layout)
    return name


def _spelt(name: str, layout: Mapping[str, str]) -> str:
    dotted = f"{name}."  # since "lm_head", a module, ends where a prefix has its dot
    for ours, theirs in layout.items():
        if dotted.startswith(ours):
            return (theirs + dotted.removeprefix(ours)).removesuffix(".")
    return name


def split_towers(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return the text tower's tensors by the names of families, all others by their own.

    Raises:
        CheckpointError: naming both, when two tensors of the file are the same of the tower.
    """
    text: dict[str, StoredTensor] = {}
    others: dict[str, StoredTensor] = {}
    for tensor in stored.values():
        name = family_name(tensor.name)
        if name is None:
            others[tensor.name] = tensor
        elif name in text:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} and {text[name].name} are both {name} of the "
                "text tower, expected one of them"
            )
        else:
            text[name] = tensor
    return text, others


def modules_to_ignore(others: Iterable[str]) -> list[str]:
    """Return patterns of the other towers' modules, as compressed-tensors writes them.

    Names in files have the prefix "model." or not, whatever transformers calls the modules.

    Args:
        others: names of the other towers' tensors.
    """
    # As often as it is there: a tower "model" would be the text tower as well.
    names = [re.sub(r"^(model\.)+", "", name).split(".") for name in others]
    towers = sorted({name[0] for name in names if len(name) > 1})
    return [rf"re:(model\.)?{re.escape(tower)}(\.|$)" for tower in towers]
