"""A folder that appears whole or not at all, however the process ends."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hf_models import MODELS, random_model, save_plain

from effort import sampled
from ostinato.checkpoint import quantize_checkpoint
from ostinato.checkpoint.new_folder import new_folder

pytestmark = pytest.mark.timeout(120)

# Quantises, and stops in the middle of it for as long as the test likes.
SCRIPT = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):  # which nohup and test runners may ignore
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in sys.argv[3:]:
    signal.signal(signal.Signals[name], signal.SIG_IGN)
from ostinato.checkpoint import quantize
from ostinato.checkpoint.writer import CheckpointWriter
from ostinato.cli.main import main
write, count = CheckpointWriter.write, 0
def slow(*args):
    global count
    write(*args)
    count += 1
    if count == 4:
        print("writing", flush=True)
        time.sleep(100)
CheckpointWriter.write = slow
sys.exit(main(["quantize", sys.argv[1], sys.argv[2], "--scheme", "int8"]))
"""
FILL = 1 << 12


def start(src: Path, dst: Path, *ignored: str) -> subprocess.Popen[str]:
    """Start a quantiser that is in the midst of its work when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(src), str(dst), *ignored],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert leftovers(dst), "it has a temporary folder"
    return process


def leftovers(dst: Path) -> list[Path]:
    return list(dst.parent.glob(f".{dst.name}.*.tmp"))


def leave(dst: Path, name: str = "0123abcd") -> Path:
    """Make what a killed run leaves."""
    folder = dst.with_name(f".{dst.name}.{name}.tmp")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(FILL))
    return folder


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return save_plain(tmp_path / "src", random_model(MODELS["llama"]))


@pytest.mark.parametrize(
    ("number", "code"),
    sampled(
        [
            (signal.SIGTERM, -signal.SIGTERM),
            (signal.SIGHUP, -signal.SIGHUP),
            (signal.SIGINT, 128 + signal.SIGINT),
        ],
        2,
    ),
)
def test_a_signal_leaves_nothing(
    number: signal.Signals, code: int, src: Path, tmp_path: Path
) -> None:
    """Port of sec_17."""
    process = start(src, tmp_path / "out")
    process.send_signal(number)
    process.communicate()
    assert process.returncode == code
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_signal_that_is_ignored_ends_nothing(src: Path, tmp_path: Path) -> None:
    """As SIGHUP under nohup."""
    process = start(src, tmp_path / "out", "SIGHUP")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.terminate()
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_the_next_run_removes_what_sigkill_left(src: Path, tmp_path: Path) -> None:
    process = start(src, tmp_path / "out")
    process.kill()
    process.communicate()
    assert leftovers(tmp_path / "out")
    quantize_checkpoint(src, tmp_path / "out", scheme="int8", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_a_run_that_goes_on_keeps_its_folder(src: Path, tmp_path: Path) -> None:
    process = start(src, tmp_path / "out")
    try:
        (running,) = leftovers(tmp_path / "out")
        quantize_checkpoint(src, tmp_path / "out", scheme="int8", progress=False)
        assert leftovers(tmp_path / "out") == [running]
        assert (running / "model.safetensors").exists()
    finally:
        process.terminate()
        process.communicate()
    assert not leftovers(tmp_path / "out")


def test_only_leftovers_of_the_same_target_go(tmp_path: Path) -> None:
    target = tmp_path / "out"
    gone = [leave(target), leave(target, "ffffffff")]
    kept = [leave(tmp_path / "out2"), leave(target, "notes"), leave(tmp_path / "x.out")]
    link = target.with_name(f".{target.name}.00000000.tmp")
    link.symlink_to(kept[0])
    file = target.with_name(f".{target.name}.00000001.tmp")
    file.write_text("a file")
    with new_folder(target) as folder:
        assert not any(path.exists() for path in gone)
        (folder / "a").write_text("a")
    assert all((path / "model.safetensors").exists() for path in kept)
    assert link.is_symlink()
    assert file.exists()


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    other = leave(tmp_path / "ab")
    with new_folder(tmp_path / "[a]*"):
        pass
    with new_folder(tmp_path / "a."):
        pass
    assert other.exists()


def test_a_leftover_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = leave(tmp_path / "out")

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    words = re.escape(f"{folder}: left by a run that was killed, or in use by another")
    with pytest.warns(UserWarning, match=words), new_folder(tmp_path / "out"):
        pass
    assert folder.exists()
    assert (tmp_path / "out").is_dir()


def test_a_folder_that_somebody_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may take a folder that is not locked yet for a leftover."""
    made: list[Path] = []
    mkdir = Path.mkdir

    def unlucky(self: Path) -> None:
        mkdir(self)
        made.append(self)
        if len(made) < 3:
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", unlucky)
    with new_folder(tmp_path / "out") as folder:
        assert folder == made[2]
    assert (tmp_path / "out").is_dir()


def test_an_error_while_a_file_is_forced_to_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output")))
    with pytest.raises(OSError, match="Input/output"), new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_during_the_clean_up_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def interrupted(path: Path, **options: bool) -> None:
        signal.raise_signal(signal.SIGINT)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    # A shell's background processes are started with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out"):
            raise ValueError
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())


def test_sigterm_during_the_clean_up_comes_after_it(tmp_path: Path) -> None:
    script = """
import shutil, signal, sys
from pathlib import Path
from ostinato.checkpoint.new_folder import new_folder
rmtree = shutil.rmtree
def interrupted(path, **options):
    shutil.rmtree = rmtree
    signal.raise_signal(signal.SIGTERM)
shutil.rmtree = interrupted
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "a").write_text("a")
    raise ValueError
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_handlers_of_the_caller_are_left_alone(tmp_path: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: calls.append(number))
    try:
        with new_folder(tmp_path / "out"):
            signal.raise_signal(signal.SIGTERM)
        assert calls == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    with new_folder(tmp_path / "second"):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_folder_is_made_in_another_thread(tmp_path: Path) -> None:
    def run() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("a")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert (tmp_path / "out" / "a").read_text() == "a"


def test_a_second_signal_does_not_stop_the_clean_up(src: Path, tmp_path: Path) -> None:
    process = start(src, tmp_path / "out")
    for _ in range(20):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    process.communicate()
    assert process.returncode == -signal.SIGTERM
    assert not leftovers(tmp_path / "out")
