"""The pages of docs/: lengths, quoted messages, and the result files that they cite."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "results" not in page.parts)
RESULTS = sorted(file for file in (DOCS / "results").rglob("*") if file.is_file())
# A name or a path of a file, with * for a part of it, as texts cite them.
CITED = re.compile(r"[\w*./-]*[\w*-]\.(?:json|md|svg|txt)(?:\.\w+)*")
PATH = re.compile(r"results/.*")
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
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
    # A reader of JSON fields has one message for all, and is given the field's name.
    field = re.fullmatch(r"…: (\w+): got …, expected .*", quoted)
    by_name = field and field[1] in _messages() and "…: …: got …, expected …" in _messages()
    assert by_name or any(pattern.search(message) for message in _messages())


def test_troubleshooting_quotes_messages() -> None:
    assert len(QUOTED) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_have_at_most_300_lines(page: Path) -> None:
    # Those of the API, which are made of docstrings, are long in the site only.
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 300


@pytest.mark.parametrize(
    "page", sorted((DOCS / "kernels").glob("*.md")), ids=lambda page: page.stem
)
def test_kernel_pages_are_short_and_have_one_picture(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert text.count("![") == 1


def _citations(texts: Iterable[Path]) -> set[str]:
    """Return the names of files in texts, their paths from `results` on where they have one. A
    pattern without a path names no results."""
    found = set()
    for text in texts:
        for name in CITED.findall(text.read_text(encoding="utf-8")):
            path = PATH.search(name)
            if path is not None:
                found.add(path.group())
            elif "*" not in name:
                found.add(name)
    return found


def _cites(name: str, file: Path) -> bool:
    return fnmatchcase(f"/{file.relative_to(DOCS).as_posix()}", f"*/{name}")


@lru_cache(maxsize=1)
def _citations_of_all() -> set[str]:
    """Return what pages, notebooks, tests and sources cite."""
    folders = ("runtime", "tests", "examples")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return _citations([*ROOT.glob("*.md"), *PAGES, *sources])


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: str(file.relative_to(DOCS)))
def test_results_are_cited(file: Path) -> None:
    assert any(_cites(name, file) for name in _citations_of_all()), "cite it, or delete it"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_shown(picture: Path) -> None:
    shown = (PurePosixPath(name).name for name in _citations_of_all())
    assert picture.name in shown, "show it, or delete it"


def test_results_are_in_the_folder_of_a_card_or_its_texts() -> None:
    folders = {file.parent for file in RESULTS}
    places = [folder.relative_to(DOCS).parts for folder in folders]
    assert all(len(parts) <= 2 or parts[2:] == ("texts",) for parts in places)
    assert {len(list(folder.iterdir())) > 25 for folder in folders} == {False}


def test_cited_results_exist() -> None:
    # A name without a path may be of any file.
    texts = [*ROOT.glob("*.md"), *PAGES, *(ROOT / "runtime").rglob("*.py")]
    named = {name for name in _citations(texts) if PATH.search(name)}
    assert len(named) > 20
    missing = [name for name in named if not any(_cites(name, file) for file in RESULTS)]
    assert sorted(missing) == []
