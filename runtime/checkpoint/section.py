"""JSON configuration files whose errors name the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..models.config_fields import Fields, shown
from .errors import CheckpointError, UnsupportedCheckpointError
from .files import MAX_CONFIG_BYTES, read_text

CONFIG_FILE = "config.json"


class Section(Fields):
    """One JSON object of a checkpoint's files. It remembers which of its fields were asked for.

    Args:
        where: the file and the keys that lead to the object, for messages.
        fields: the object.

    Raises:
        CheckpointError: when `fields` is no object.
    """

    malformed = CheckpointError
    unsupported = UnsupportedCheckpointError

    def __init__(self, where: str, fields: object) -> None:
        super().__init__(where, fields)
        self._asked: set[str] = set()

    @staticmethod
    def read(file: Path, most: int = MAX_CONFIG_BYTES) -> Section:
        """Read a file that holds one object.

        Args:
            file: a regular file.
            most: bytes that it may hold.

        Raises:
            CheckpointError: when the file is missing, unreadable, too large or not a JSON object.
        """
        text = read_text(file, most)
        return Section(str(file), parse_json(text, f"{file}: not valid JSON"))

    def get(self, name: str) -> Any:
        """Return a field, None when it is absent."""
        self._asked.add(name)
        return super().get(name)

    def refusal(self, name: str, reason: str) -> UnsupportedCheckpointError:
        """Return the error of a field that asks for what is not supported."""
        return UnsupportedCheckpointError(
            f"{self.where}: {name}: got {shown(self.get(name))}: {reason}"
        )

    def reject(self, name: str, reason: str) -> None:
        """Check that a field is absent.

        Raises:
            UnsupportedCheckpointError: with the reason, when it is not.
        """
        if self.get(name) is not None:
            raise self.refusal(name, reason)

    def reject_others(self, *harmless: str) -> None:
        """Check that every field not asked for until now is empty: none is silently ignored.

        Args:
            harmless: further fields, which may hold anything.

        Raises:
            UnsupportedCheckpointError: naming a field that is not empty.
        """
        for name, value in self.fields.items():
            if value and name not in self._asked and name not in harmless:
                raise UnsupportedCheckpointError(
                    f"{self.where}: {name}: got {shown(value)}, a field that is not supported"
                )


def parse_json(text: str | bytes, wrong: str) -> Any:
    """Return what a JSON text holds.

    Args:
        text: the text, in UTF-8 when it is bytes.
        wrong: what the error shall say before the reason.

    Raises:
        CheckpointError: when it is no JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{wrong}: {error}") from error
