"""Where prompts come from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ostinato.cli.command import UserError
from ostinato.cli.prompts import read_prompts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pipe(content: bytes) -> io.TextIOWrapper:
    # An encoding in which the prompts must not be read.
    return io.TextIOWrapper(io.BytesIO(content), encoding="ascii")


def test_arguments_are_taken_as_they_are() -> None:
    assert read_prompts(["a", "", " b\n", "-"], None) == ["a", "", " b\n", "-"]


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b"one", ["one"]),
        (b"one\n\n  two \n \t\n", ["one", "  two "]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo\n", ["one", "\ufefftwo"]),  # a mark begins a file
        ("größer\na\u2028b\x0cc\n".encode(), ["größer", "a\u2028b\x0cc"]),
    ],
)
def test_files_have_one_prompt_per_line(
    content: bytes, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    assert read_prompts([], str(file)) == prompts
    for arguments, name in (([], None), (["-"], None), ([], "-")):
        monkeypatch.setattr("sys.stdin", pipe(content))
        assert read_prompts(arguments, name) == prompts


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_prompts_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"prompts\.txt: got no prompt, expected one per line"):
        read_prompts([], str(file))
    monkeypatch.setattr("sys.stdin", pipe(content))
    with pytest.raises(UserError, match="stdin: got no prompt"):
        read_prompts([], None)


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(UserError, match="got no prompt, expected one as argument"):
        read_prompts([], None)


def test_two_sources_are_refused() -> None:
    with pytest.raises(UserError, match="both as arguments and in --prompts-file"):
        read_prompts(["a"], "prompts.txt")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing: No such file"):
        read_prompts([], str(tmp_path / "missing"))
    with pytest.raises(UserError, match="Is a directory"):
        read_prompts([], str(tmp_path))


def test_what_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"prompts\.txt: got .*0xff.*, expected UTF-8"):
        read_prompts([], str(file))
    with pytest.raises(UserError, match=r"prompt 2: got .*, expected UTF-8"):
        read_prompts(["a", "\udcff"], None)
