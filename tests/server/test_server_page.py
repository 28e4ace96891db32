"""The files of the page at /, without a browser; tests/browser has one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ostinato.server.page
from ostinato.server import Settings
from serving import Client, make_service, serving

FOLDER = Path(ostinato.server.page.__file__).parent
FILES = sorted(file for file in FOLDER.iterdir() if file.suffix in (".css", ".html", ".js", ".svg"))


@pytest.fixture(scope="module")
def stranger() -> Iterator[Client]:
    """Serve with a key, which this client does not know."""
    with serving(make_service(settings=Settings(port=0, api_keys=("secret",)))) as client:
        yield client


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_are_served_without_a_key(stranger: Client, file: Path) -> None:
    path = "/" if file.name == "index.html" else f"/page/{file.name}"
    answer = stranger.send("GET", path)
    assert answer.status == 200
    assert answer.read() == file.read_bytes()
    kinds = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
    assert answer.headers["content-type"].startswith(kinds.get(file.suffix, "image/svg+xml"))
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "*" not in policy


@pytest.mark.parametrize("path", ["/page", "/page/", "/page/routes.py", "/page/../../app.py", "//"])
def test_nothing_else_is_open(stranger: Client, path: str) -> None:
    assert stranger.get(path)[0] == 401


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_head_is_answered_as_get_without_a_body(stranger: Client, path: str) -> None:
    connection = stranger.connect()
    heads = []
    # One connection: a body would be taken for the beginning of the next answer.
    for method in ("HEAD", "GET", "HEAD"):
        connection.request(method, path)
        answer = connection.getresponse()
        heads.append(
            (answer.status, answer.headers["content-type"], answer.headers["content-length"])
        )
        assert bool(answer.read()) == (method == "GET")
    assert heads[0][0] == 200
    assert len(set(heads)) == 1


def test_files_name_only_each_other() -> None:
    names = {file.name for file in FILES}
    for file in FILES:
        text = file.read_text()
        for name in re.findall(r'(?:src|href)="/page/([^"]*)"|from "\./([^"]*)"', text):
            assert max(name) in names
        outside = re.findall(r"[a-z]+://[^\s\"']*", text)
        assert outside in ([], ["http://www.w3.org/2000/svg"]), file.name
        # Ways to turn a text into markup or code, and places to keep a key in.
        for way in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "Storage", "cookie"):
            assert way not in text, file.name
