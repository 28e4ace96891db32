"""The pages of docs/: lengths, quoted messages, and the site's table of contents."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "results" not in page.parts)
# Notebooks are records of measurements; the API's pages are made of docstrings.
APART = {"notebooks", "api"}
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### `(.+)`$", TROUBLESHOOTING, flags=re.MULTILINE)


@lru_cache(maxsize=1)
def _messages() -> list[str]:
    """Return all string literals of the package, with … for what is filled in."""
    found = []
    for folder in ("runtime", "graphs"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append("".join(_literal(part) for part in node.values))
    return [message.replace("`", "") for message in found]


def _literal(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "…"


@pytest.mark.parametrize("quoted", QUOTED)
def test_messages_in_troubleshooting_exist(quoted: str) -> None:
    pieces = [re.escape(piece.strip()) for piece in quoted.split("…")]
    pattern = re.compile(".*".join(pieces))
    assert any(pattern.search(message) for message in _messages())


def test_troubleshooting_quotes_messages() -> None:
    assert len(QUOTED) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_have_at_most_300_lines(page: Path) -> None:
    if not APART & set(page.relative_to(DOCS).parts):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 300
