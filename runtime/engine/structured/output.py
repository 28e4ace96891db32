"""The form that a caller wants a text to have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

MOST_CHARACTERS = 65536  # of a schema or grammar, and of all choices together
_MOST_REGEX = 8192
_MOST_CHOICES = 4096

# Keywords of JSON schemas that xgrammar passes over: its grammars would allow what they forbid.
_UNENFORCED = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "$dynamicRef")
# Those that it applies to values of the type beside them only.
_OF_A_TYPE = (
    *("minLength", "maxLength", "pattern", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)
# Of these it reads one, and no keyword beside it.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("items", "additionalProperties", "propertyNames", "contains", "unevaluatedProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True)
class StructuredOutput:
    """Exactly one of these forms; the text has no other tokens before its end.

    Args:
        json_schema: a JSON schema, as text or as a mapping. Objects have the properties that it
            names, in their order. `oneOf` is read as `anyOf`; keywords that could not be enforced,
            such as `not`, `uniqueItems` and references to other documents, are refused.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches.
        choice: the texts there may be.
        grammar: in the EBNF of GBNF, whose first rule is `root`.

    Raises:
        TypeError, ValueError: when there is not exactly one, or one of the wrong type, or too long.
    """

    json_schema: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise TypeError(f"json_object: got {self.json_object!r}, expected bool")
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            names = [f.name for f in fields(self)]
            raise ValueError(f"structured: got {given or 'nothing'}, expected one of {names}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        _check_text("json_schema", self.json_schema, MOST_CHARACTERS)
        _check_text("regex", self.regex, _MOST_REGEX)
        _check_text("grammar", self.grammar, MOST_CHARACTERS)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False))

    @property
    def text(self) -> str:
        """What a compiler of this kind reads."""
        if self.choice is not None:
            texts = (json.dumps(text, ensure_ascii=False) for text in self.choice)
            return "root ::= " + " | ".join(texts)
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else "object"


def _schema(schema: object) -> str:
    """Return a schema as text, of a mapping or of another text."""
    if not isinstance(schema, str | Mapping):
        raise TypeError(f"json_schema: got {type(schema).__name__}, expected a text or a mapping")
    try:
        if isinstance(schema, str):
            _check_text("json_schema", schema, MOST_CHARACTERS)
            schema = json.loads(schema)
        text = json.dumps(schema, allow_nan=False)
    except (RecursionError, TypeError, ValueError) as error:
        if str(error).startswith("json_schema:"):
            raise
        raise ValueError(f"json_schema: got no JSON ({error}), expected a schema") from error
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"json_schema: got {text[:80]}, expected an object or a boolean")
    _check_keywords(schema)
    return text


def _check_keywords(schema: object) -> None:
    """Refuse what xgrammar would pass over without a word."""
    left = [schema]
    while left:
        found = left.pop()
        if not isinstance(found, Mapping):
            continue
        fault = _unenforced(found)
        if fault is not None:
            raise ValueError(f"json_schema: got {fault}, which cannot be enforced")
        left += [found[name] for name in _SCHEMAS if name in found]
        for name in _LISTS:
            if isinstance(within := found.get(name), Sequence):
                left += within
        for name in _NAMED:
            if isinstance(within := found.get(name), Mapping):
                left += within.values()


def _unenforced(schema: Mapping[str, object]) -> str | None:
    """Return what of a schema is not enforced, those in it left aside."""
    for name in _UNENFORCED:
        if name in schema:
            return f"{name!r}"
    if schema.get("uniqueItems") is True:
        return "'uniqueItems'"
    reference, parts = schema.get("$ref"), schema.get("allOf")
    if isinstance(reference, str) and not reference.startswith("#"):
        return f"a '$ref' to another document, {reference[:80]!r}"
    if isinstance(parts, list | tuple) and len(parts) > 1:
        return f"'allOf' of {len(parts)} schemas"
    alone = [name for name in _ALONE if name in schema]
    checked = (*_OF_A_TYPE, "properties", "required", "items", "enum", "const", *alone[1:])
    for name in checked:
        if alone and name in schema:
            return f"{name!r} beside {alone[0]!r}"
    for name in _OF_A_TYPE:
        if name in schema and not {"type", "enum", "const"} & schema.keys():
            return f"{name!r} without a 'type'"
    return None


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes):
        raise TypeError(f"choice: got {type(choices).__name__}, expected a sequence of str")
    if not 1 <= len(choices) <= _MOST_CHOICES:
        raise ValueError(f"choice: got {len(choices)} texts, expected 1 to {_MOST_CHOICES}")
    for choice in choices:
        _check_text("choice", choice, MOST_CHARACTERS)
    _check_text("choice", "".join(choices), MOST_CHARACTERS)
    return tuple(choices)


def _check_text(name: str, text: object, most: int) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise TypeError(f"{name}: got {type(text).__name__}, expected str")
    if not 1 <= len(text) <= most:
        raise ValueError(f"{name}: got {len(text)} characters, expected 1 to {most}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{name}: got a text with {half!r}, expected valid Unicode") from error
