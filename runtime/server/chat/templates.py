"""Reads the chat templates of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.errors import CheckpointError
from ...checkpoint.files import is_there, read_text
from ...checkpoint.section import Section
from .render import ChatTemplate

_MOST_BYTES = 1 << 20  # of a template
_MOST_TEMPLATES = 16
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


def load_chat_template(folder: Path, timeout: float) -> ChatTemplate | None:
    """Return the templates of a checkpoint; None where it has none.

    `chat_template.jinja` goes before `chat_template.json`, and that before the field
    `chat_template` of `tokenizer_config.json`; files in `additional_chat_templates` are further
    ones.

    Args:
        folder: of the checkpoint.
        timeout: seconds for one rendering.

    Raises:
        CheckpointError: naming the file that is malformed.
    """
    file = folder / "tokenizer_config.json"
    fields: Mapping[str, Any] = Section.read(file).fields if is_there(file) else {}
    templates = _named(fields.get("chat_template"), file)
    separate = folder / "chat_template.json"
    if is_there(separate):
        templates |= _named(Section.read(separate).fields.get("chat_template"), separate)
    single = folder / "chat_template.jinja"
    if is_there(single):
        templates["default"] = read_text(single, _MOST_BYTES)
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja"))[:_MOST_TEMPLATES]:
        templates[extra.stem] = read_text(extra, _MOST_BYTES)
    if "default" not in templates:
        return None
    tokens = {name: text for name in _SPECIAL if (text := _token(fields.get(name))) is not None}
    return ChatTemplate(templates, tokens, timeout)


def _named(value: Any, file: Path) -> dict[str, str]:
    """Return templates by name: of one text, or of a list of {"name": ..., "template": ...}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and len(value) <= _MOST_TEMPLATES:
        named = {
            item["name"]: item["template"]
            for item in value
            if isinstance(item, dict)
            and isinstance(item.get("name"), str)
            and isinstance(item.get("template"), str)
        }
        if len(named) == len(value):
            return named
    raise CheckpointError(
        f"{file}: chat_template: got {type(value).__name__}, expected a text or named texts"
    )


def _token(value: Any) -> str | None:
    """Return the text of a special token, which is a text or {"content": text, ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
