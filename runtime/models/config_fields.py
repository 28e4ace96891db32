"""Fields of a JSON configuration, read with their types: every error names the field."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self

# Sizes, positions and token ids are 32-bit numbers on the device.
_INTEGER_MAX = 2**31 - 1


_LONGEST_SHOWN = 300

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist = 4, 12, 12
_short.maxstring = _short.maxlong = _short.maxother = 200


class UnsupportedModelError(ValueError):
    """A model whose configuration asks for something this runtime does not implement."""


class Fields:
    """One JSON object of a configuration file. A field that is null counts as absent.

    Args:
        where: the file and the keys that lead to the object, for messages.
        fields: the object.

    Raises:
        `malformed`: when `fields` is no object.
    """

    malformed: ClassVar[type[ValueError]] = UnsupportedModelError
    unsupported: ClassVar[type[ValueError]] = UnsupportedModelError

    def __init__(self, where: str, fields: object) -> None:
        if not isinstance(fields, Mapping):
            raise self.malformed(f"{where}: got {shown(fields)}, expected an object")
        self.where = where
        self.fields: Mapping[str, Any] = fields

    def get(self, name: str) -> Any:
        """Return a field, None when it is absent."""
        return self.fields.get(name)

    def wrong(self, name: str, expected: str) -> ValueError:
        """Return the error of a field that is not what was expected."""
        return self.malformed(
            f"{self.where}: {name}: got {shown(self.get(name))}, expected {expected}"
        )

    def require(self, name: str) -> None:
        """Check that a field is written, if only as null.

        Raises:
            `malformed`: when it is not.
        """
        if name not in self.fields:
            raise self.malformed(f"{self.where}: {name}: missing, and models differ in its default")

    def child(self, name: str) -> Self:
        """Return the object in a field.

        Raises:
            `malformed`: when the field is absent or no object.
        """
        return type(self)(f"{self.where}: {name}", self.get(name))

    def only(self, *known: str) -> None:
        """Check that no other fields than these are there, but for null ones.

        Raises:
            `unsupported`: naming one.
        """
        for name, value in self.fields.items():
            if value is not None and name not in known:
                raise self.unsupported(
                    f"{self.where}: {name}: got {shown(value)}, a field that is not supported"
                )

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _INTEGER_MAX
    ) -> int:
        """Return an integer from `least` to `most`.

        Raises:
            `malformed`: when it is something else, or absent without a default.
        """
        value: Any = default if self.get(name) is None else self.get(name)
        if not _is_integer(value, least, most):
            raise self.wrong(name, f"an integer from {least} to {most}")
        return int(value)

    def optional_integer(
        self, name: str, *, least: int = 1, most: int = _INTEGER_MAX
    ) -> int | None:
        """Return an integer from `least` to `most`, None when the field is absent.

        Raises:
            `malformed`: when it is something else.
        """
        return None if self.get(name) is None else self.integer(name, least=least, most=most)

    def integers(self, name: str, *, least: int = 1, most: int = _INTEGER_MAX) -> tuple[int, ...]:
        """Return the integers of a field that holds none, one or a list of them.

        Raises:
            `malformed`: when it holds something else, or one below `least` or above `most`.
        """
        value = self.get(name)
        values = () if value is None else value if isinstance(value, list) else (value,)
        if not all(_is_integer(item, least, most) for item in values):
            raise self.wrong(name, f"integers from {least} to {most}")
        return tuple(values)

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        above: float = 0.0,
        most: float = sys.float_info.max,
    ) -> float:
        """Return a number above `above`, at most `most`.

        Raises:
            `malformed`: when it is something else, or absent without a default.
        """
        value: Any = default if self.get(name) is None else self.get(name)
        if type(value) not in (int, float) or not above < value <= most:
            bound = "" if most == sys.float_info.max else f" and at most {most}"
            raise self.wrong(name, f"a finite number above {above}{bound}")
        return float(value)

    def numbers(self, name: str, *, least: float = sys.float_info.min) -> tuple[float, ...]:
        """Return a list of finite numbers of at least `least`, by default above 0.

        Raises:
            `malformed`: when it is something else, or absent.
        """
        value = self.get(name)
        if not isinstance(value, list) or not all(
            type(item) in (int, float) and least <= item <= sys.float_info.max for item in value
        ):
            bound = "above 0" if least > 0 else f"of at least {least:g}"
            raise self.wrong(name, f"a list of finite numbers {bound}")
        return tuple(map(float, value))

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            `malformed`: when it is something else.
        """
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def strings(self, *names: str) -> tuple[str, ...]:
        """Return the list of strings in the first of these fields that is not empty.

        Raises:
            `malformed`: when a field is something else.
        """
        found: tuple[str, ...] = ()
        for name in names:
            value = self.get(name) or []
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.wrong(name, "a list of strings")
            found = found or tuple(value)
        return found

    def choice(self, name: str, *accepted: Any, default: Any = None) -> Any:
        """Return a field that must have one of the accepted values.

        Raises:
            `unsupported`: when it has another, absence counting as `default`.
        """
        value = default if self.get(name) is None else self.get(name)
        if value not in accepted:
            expected = " or ".join(repr(item) for item in accepted)
            raise self.unsupported(f"{self.where}: {name}: got {shown(value)}, expected {expected}")
        return value


def shown(value: object) -> str:
    """Return what messages show of a value: of a large or deep one, its beginning."""
    text = _short.repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _is_integer(value: object, least: int, most: int) -> bool:
    # Not isinstance(): true and false are no integers here.
    return type(value) is int and least <= value <= most
