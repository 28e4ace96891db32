"""Where the cache is, whatever the environment says and does not say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.cli.main import main
from ostinato.jit.errors import KernelCacheError
from ostinato.jit.location import cache_folder
from ostinato.ops.linear.tile_tuning import tuning_for


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OSTINATO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as a user of a number that has no name, without HOME, as in containers."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", _unknown)


def _unknown(uid: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"OSTINATO_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"OSTINATO_CACHE": "~/b", "HOME": "/h"}, "/h/b"),
        ({"OSTINATO_CACHE": "", "HOME": "/h"}, "/h/.cache/ostinato/kernels"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/ostinato/kernels"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/ostinato/kernels"),
        ({"HOME": "/h"}, "/h/.cache/ostinato/kernels"),
    ],
)
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == folder


@pytest.mark.parametrize("value", ["rel", "./rel", "rel/../rel", "cache of " + "x" * 50])
def test_a_relative_cache_stays_where_it_was_first(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = f"{value}-{tmp_path.name}"  # other tests ask first, too
    monkeypatch.setenv("OSTINATO_CACHE", value)
    monkeypatch.chdir(tmp_path)
    first = cache_folder()
    assert first == tmp_path / value
    monkeypatch.chdir("/")
    assert cache_folder() == first


def test_a_relative_cache_needs_a_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("OSTINATO_CACHE", "rel-of-a-folder-that-is-gone")
    with pytest.raises(KernelCacheError, match=r"OSTINATO_CACHE: got 'rel-of.*an absolute path"):
        cache_folder()


def test_a_cache_of_an_unknown_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", "~nosuchuser/x")
    words = r"OSTINATO_CACHE: got '~nosuchuser/x', expected an absolute path, since ~nosuchuser has"
    with pytest.raises(KernelCacheError, match=words):
        cache_folder()


@pytest.mark.parametrize(("value", "got"), [(None, "none"), ("~/x", "'~/x'")])
def test_a_user_without_a_home_is_told_to_name_a_cache(
    value: str | None, got: str, homeless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("OSTINATO_CACHE", value)
    words = rf"OSTINATO_CACHE: got {got}, expected an absolute path, since user {os.getuid()} has"
    with pytest.raises(KernelCacheError, match=words):
        cache_folder()
    monkeypatch.setenv("OSTINATO_CACHE", "/x")
    assert cache_folder() == Path("/x")


def test_a_relative_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "h")
    with pytest.raises(KernelCacheError, match="HOME: got 'h', expected an absolute path"):
        cache_folder()


def test_without_a_gpu_no_cache_is_needed_to_choose_kernels(homeless: None) -> None:
    tuning_for.cache_clear()
    assert tuning_for("") == {}


@pytest.mark.parametrize("command", ["kernels", "build --only embed-bf16"])
def test_commands_say_it_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", "~nosuchuser/x")
    assert main(command.split()) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"ostinato {command.split()[0]}: error: OSTINATO_CACHE: got '~nosuch")
    assert said.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_uid_without_a_name_is_such_a_user() -> None:
    code = (
        "import os; from ostinato.jit.location import cache_folder; os.setuid(123456)\n"
        "try: cache_folder()\nexcept Exception as error: print(type(error).__name__, error)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "HOME"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("KernelCacheError OSTINATO_CACHE: got none")
    assert "user 123456 has no home folder" in done.stdout
