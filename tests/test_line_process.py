"""Processes that answer lines: why there may be no answer."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ostinato.line_process import LineProcess, NoAnswerError, Silence

ECHO = "import sys\nfor line in sys.stdin: print(line.strip() * {times}, flush=True)"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], LineProcess]]:
    made: list[LineProcess] = []

    def start(source: str) -> LineProcess:
        program = tmp_path / f"{len(made)}.py"
        program.write_text(source)
        made.append(LineProcess(program, {}))
        return made[-1]

    yield start
    for process in made:
        process.end()


def test_each_line_is_answered(started: Callable[[str], LineProcess]) -> None:
    process = started(ECHO.format(times=2))
    for line in (b"a", b"", b"b" * 200_000):  # more than a pipe holds
        assert process.ask(line, 30.0) == 2 * line


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("import time\ntime.sleep(60)", b"x" * (1 << 20), Silence.UNREAD),
        ("import time\ntime.sleep(60)", b"x", Silence.LATE),
        ("input()", b"x", Silence.ENDED),
        (ECHO.format(times=9), b"x" * 1000, Silence.LONG),
    ],
    ids=["unread", "late", "ended", "long"],
)
def test_silence_has_a_reason(
    started: Callable[[str], LineProcess], source: str, line: bytes, reason: Silence
) -> None:
    process = started(source)
    seconds = 0.2 if "sleep" in source else 30.0
    begun = time.monotonic()
    with pytest.raises(NoAnswerError) as caught:
        process.ask(line, seconds, most_bytes=5000)
    assert caught.value.reason is reason
    assert time.monotonic() - begun < 30


def test_a_process_that_has_ended_is_gone(started: Callable[[str], LineProcess]) -> None:
    process = started("pass")
    process._process.wait(timeout=30)
    with pytest.raises(NoAnswerError) as caught:
        process.ask(b"x", 30.0)
    assert caught.value.reason is Silence.GONE


def test_a_process_ends_with_whoever_asks_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nfor line in sys.stdin: print(1, flush=True)")
    process = LineProcess(tmp_path / "program.py", {})
    assert process.ask(b"a", 30) == b"1"
    child = process._process
    del process
    gc.collect()
    assert child.wait(30) == -signal.SIGKILL


def test_programs_import_what_this_process_can(
    started: Callable[[str], LineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From folders that PYTHONPATH named, say; not from the current one."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "of_the_parent.py").write_text("")
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "of_a_stranger.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.syspath_prepend("")
    found = "import importlib.util as u; print(u.find_spec(input()) is not None, flush=True)"
    assert started(found).ask(b"of_the_parent", 30.0) == b"True"
    assert started(found).ask(b"of_a_stranger", 30.0) == b"False"
