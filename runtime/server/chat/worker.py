"""Renders chat templates of strangers; run as a program of its own by `render.py`.

The sandbox keeps a template from running code. Against one that loops or grows there is no help
within a process: this one has a limit of memory and of time, and its parent ends it.

It reads JSON documents from standard input, a line each: the templates first, answered with a line
once it is ready, then `{"template": name, "variables": {...}, "seconds": s}`, each answered with a
line `{"text": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_MEMORY = 1 << 30
_MOST_CHARACTERS = 32 << 20


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant says; in a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # jinja2's own escapes what is special in HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment as transformers has it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _render(environment: ImmutableSandboxedEnvironment, source: str, variables: Any) -> str:
    pieces, size = [], 0
    for piece in environment.from_string(source).generate(variables):
        size += len(piece)
        if size > _MOST_CHARACTERS:
            raise TemplateError(f"it wrote more than {_MOST_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def main() -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    environment = _environment()
    templates = json.loads(sys.stdin.readline())
    _answer({})
    for line in sys.stdin:
        order = json.loads(line)
        # The parent ends it sooner; this is for when the parent is gone.
        seconds = int(time.process_time() + order["seconds"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            text = _render(environment, templates[order["template"]], order["variables"])
            _answer({"text": text})
        except MemoryError:
            _answer({"error": "it took too much memory"})
        except Exception as error:
            _answer({"error": f"{type(error).__name__}: {error}"[:500]})


def _answer(document: dict[str, str]) -> None:
    line = json.dumps(document)  # whole, before any of it is written
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
