"""JSON configuration files whose errors name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.checkpoint.errors import CheckpointError, UnsupportedCheckpointError


class Section:
    """One JSON object of a configuration file. It remembers which of its fields were asked for.

    Args:
        where: the file and the keys that lead to the object, for messages.
        fields: the object.

    Raises:
        CheckpointError: when `fields` is no object.
    """

    def __init__(self, where: str, fields: object) -> None:
        if not isinstance(fields, Mapping):
            raise CheckpointError(f"{where}: got {fields!r}, expected an object")
        self.where = where
        self.fields: Mapping[str, Any] = fields
        self._asked: set[str] = set()

    @staticmethod
    def read(file: Path) -> Section:
        """Read a file that holds one object.

        Raises:
            CheckpointError: when the file is missing, unreadable or not a JSON object.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        try:
            return Section(str(file), json.loads(text))
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{file}: not valid JSON: {error}") from error

    def get(self, name: str) -> Any:
        """Return a field, None when it is absent."""
        self._asked.add(name)
        return self.fields.get(name)

    def child(self, name: str) -> Section:
        """Return the object in a field.

        Raises:
            CheckpointError: when the field is absent or no object.
        """
        return Section(f"{self.where}: {name}", self.get(name))

    def strings(self, *names: str) -> tuple[str, ...]:
        """Return the list of strings in the first of these fields that is not empty.

        Raises:
            CheckpointError: when a field is something else.
        """
        found: tuple[str, ...] = ()
        for name in names:
            value = self.get(name) or []
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise CheckpointError(
                    f"{self.where}: {name}: got {value!r}, expected a list of strings"
                )
            found = found or tuple(value)
        return found

    def choice(self, name: str, *accepted: Any, default: Any = None) -> Any:
        """Return a field that must have one of the accepted values.

        Raises:
            UnsupportedCheckpointError: when it has another, absence counting as `default`.
        """
        value = self.get(name)
        value = default if value is None else value
        if value not in accepted:
            expected = " or ".join(repr(item) for item in accepted)
            raise UnsupportedCheckpointError(
                f"{self.where}: {name}: got {value!r}, expected {expected}"
            )
        return value

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
                    f"{self.where}: {name}: got {value!r}, a field that is not supported"
                )
