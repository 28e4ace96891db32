"""Documents are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.jit.files import write_whole


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    for text in ("µs", "longer than before"):
        write_whole(file, text)
        assert file.read_text(encoding="utf-8") == text
        assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f.json"
    write_whole(file, "old")

    def interrupted(path: Path, text: str, encoding: str) -> int:
        with path.open("w", encoding=encoding) as stream:
            stream.write(text[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_is_kept_and_its_target_changed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"


def test_a_device_is_written_to(tmp_path: Path) -> None:
    write_whole(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        write_whole(tmp_path, "text")
