"""Building: what is compiled, what is kept, and that no failure leaves half a library behind.

A stand-in for nvcc makes these quick; test_kernels_nvcc.py compiles with the real one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from jit_probe import HERE, Probe, fake_nvcc

from ostinato.jit import cache as cache_module
from ostinato.jit.cache import Entry, exclusive_build
from ostinato.jit.compiler import Plan, build, find, plan
from ostinato.jit.errors import KernelBuildError

_BUILD = """\
import signal
import sys
# A job that a shell script started in the background inherits SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from jit_probe import Probe
from ostinato.jit.compiler import build, plan
build([plan(Probe(waste=int(waste), behaviour=sys.argv[1])) for waste in sys.argv[2:]])
"""


def _process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD, *arguments],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        stderr=subprocess.PIPE,
        text=True,
    )


def _started_compiler(calls: Path) -> int:
    """Wait until a slow compiler runs, and return its process id."""
    started = Path(f"{calls}.started")
    deadline = time.monotonic() + 30
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(started.read_text())


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended, and not asked about yet


def _calls(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("unfinished-*"))


def _plans(*wastes: int, behaviour: str = "work") -> list[Plan]:
    return [plan(Probe(waste=waste, behaviour=behaviour)) for waste in wastes]


def test_a_build_is_found_again(cache: Path, nvcc_calls: Path) -> None:
    (item,) = _plans(3)
    assert find(item) is None
    (built,) = build([item])
    assert find(item) == built
    assert (built.variant, built.mode, built.nvcc) == ("probe-3-work", "release", "13.0.88")
    assert (built.usage.registers, built.usage.smem, built.usage.warnings) == (42, 128, ())
    assert built.seconds >= 0
    assert built.library.is_file()
    assert built.library.is_relative_to(cache)


def test_only_what_is_missing_is_compiled_and_reported(cache: Path, nvcc_calls: Path) -> None:
    build(_plans(1, 2))
    reported: list[Entry] = []
    entries = build(_plans(2, 3, 1), report=reported.append)
    assert [entry.variant for entry in entries] == ["probe-2-work", "probe-3-work", "probe-1-work"]
    assert [entry.variant for entry in reported] == ["probe-3-work"]
    assert len(_calls(nvcc_calls)) == 3
    assert not _leftovers(cache)


def test_a_build_with_nothing_to_do_needs_no_writable_cache(
    cache: Path, nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(_plans(1))
    monkeypatch.setattr(cache_module, "fcntl", None)
    assert len(build(_plans(1))) == 1


def test_another_compiler_makes_another_library(
    tmp_path: Path, nvcc_calls: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(_plans(1))
    fake_nvcc(tmp_path / "newer", recorder, version="13.1.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "newer"))
    assert find(*_plans(1)) is None
    assert build(_plans(1))[0].nvcc == "13.1.0"


def test_without_nvcc_what_another_machine_built_is_found(
    nvcc_calls: Path, request: pytest.FixtureRequest
) -> None:
    (built,) = build(_plans(1))
    request.getfixturevalue("no_nvcc")
    assert find(*_plans(1)) == built
    assert find(*_plans(2)) is None


def test_without_jit_what_another_compiler_built_is_found(
    tmp_path: Path, nvcc_calls: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built,) = build(_plans(1))
    fake_nvcc(tmp_path / "newer", recorder, version="13.1.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "newer"))
    monkeypatch.setenv("OSTINATO_JIT", "0")
    assert find(*_plans(1)) == built


@pytest.mark.parametrize("jit", ["0", "1"])
def test_a_compiler_that_does_not_run_is_no_reason_to_leave_what_there_is(
    jit: str, tmp_path: Path, nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built,) = build(_plans(1))
    broken = tmp_path / "broken" / "bin" / "nvcc"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "broken"))
    monkeypatch.setenv("OSTINATO_JIT", jit)
    assert find(*_plans(1)) == built
    if jit == "0":
        assert find(*_plans(2)) is None
    else:
        with pytest.raises(KernelBuildError, match="does not run"):
            find(*_plans(2))


def test_a_process_forked_during_a_build_does_not_hold_up_the_next(cache: Path) -> None:
    with exclusive_build(cache):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks among threads
            child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with open(cache / "build.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_build_that_waited_for_a_lock_that_is_gone_waits_for_the_next(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    leave, order = threading.Event(), []

    def wait() -> None:
        with exclusive_build(cache):
            order.append("waited")

    with exclusive_build(cache):
        waiting = threading.Thread(target=wait)
        waiting.start()
        while "waiting for another build" not in capfd.readouterr().err:
            time.sleep(0.01)
        (cache / "build.lock").unlink()

        def build_after() -> None:
            with exclusive_build(cache) as folder:
                order.append("began")
                leave.wait(timeout=60)
                assert folder.is_dir()
                order.append("ended")

        after = threading.Thread(target=build_after)
        after.start()
        while not order:
            time.sleep(0.01)
    while "waiting for another build" not in capfd.readouterr().err:
        time.sleep(0.01)
    leave.set()
    for thread in (after, waiting):
        thread.join(timeout=60)
    assert order == ["began", "ended", "waited"]


def test_paths_may_hold_what_shells_and_ninja_treat_specially(
    tmp_path: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "a $HOME: 'b'"))
    home = tmp_path / "cuda"
    fake_nvcc(home, recorder)
    home.rename(tmp_path / "c $x: d")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "c $x: d"))
    script = tmp_path / "c $x: d" / "bin" / "nvcc"
    script.write_text(script.read_text().replace(f">> {home}", '>> "$(dirname "$0")"'))
    (built,) = build(_plans(1))
    assert built.library.is_file()


def test_a_failure_shows_the_compilers_words_and_keeps_the_rest(
    cache: Path, nvcc_calls: Path
) -> None:
    good, bad = _plans(1)[0], _plans(2, behaviour="fail")[0]
    with pytest.raises(KernelBuildError, match=r"probe-2-fail \(release\):\n.*no such thing"):
        build([bad, good])
    assert find(good) is not None
    assert find(bad) is None
    assert not _leftovers(cache)


def test_a_source_edited_during_the_build_is_not_published(
    cache: Path, nvcc_calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "probe.cu"
    source.write_text("// before\n")
    monkeypatch.setattr(Probe, "source", source)
    script = nvcc_calls.parent / "bin" / "nvcc"
    script.write_text(script.read_text() + f"echo '// after' > {source}\n")
    (item,) = _plans(1)
    with pytest.raises(KernelBuildError, match="probe-1-work: a source was edited while"):
        build([item])
    assert [path.name for path in cache.iterdir()] == ["build.lock"]


@pytest.mark.parametrize("behaviour", ["full", "partial"])
def test_a_full_disk_in_the_compiler_leaves_the_cache_as_it_was(
    cache: Path, nvcc_calls: Path, behaviour: str
) -> None:
    with pytest.raises(KernelBuildError, match="fatal: No space"):
        build(_plans(1, behaviour=behaviour))
    assert [path.name for path in cache.iterdir()] == ["build.lock"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_while_publishing_leaves_the_cache_as_it_was(
    cache: Path, nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module.os, call, full)
    with pytest.raises(KernelBuildError, match=r"cannot write to .*No space left on device"):
        build(_plans(1))
    assert [path.name for path in cache.iterdir()] == ["build.lock"]


def test_a_cache_that_cannot_be_made_is_an_error(
    tmp_path: Path, nvcc_calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelBuildError, match="cannot write to"):
        build(_plans(1))


def test_two_processes_compile_each_kernel_once(cache: Path, nvcc_calls: Path) -> None:
    processes = [_process("pause", "1", "2"), _process("pause", "2", "1")]
    said = "".join(process.communicate(timeout=60)[1] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert len(_calls(nvcc_calls)) == 2
    assert all(find(item) is not None for item in _plans(1, 2, behaviour="pause"))
    assert not _leftovers(cache)


def test_a_killed_build_leaves_nothing_in_the_way(cache: Path, nvcc_calls: Path) -> None:
    process = _process("slow", "1")
    _started_compiler(nvcc_calls)
    process.kill()
    process.communicate(timeout=30)
    assert _leftovers(cache)
    assert find(*_plans(1, behaviour="slow")) is None

    build(_plans(2))
    assert not _leftovers(cache)


def test_an_interrupted_build_ends_its_compilers(cache: Path, nvcc_calls: Path) -> None:
    process = _process("slow", "1")
    compiler = _started_compiler(nvcc_calls)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in said
    assert not _leftovers(cache)
    assert not _runs(compiler)


def test_one_build_waits_for_another_and_says_so(
    cache: Path, nvcc_calls: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with exclusive_build(cache):
        process = _process("work", "1")
        assert process.stderr is not None
        assert process.stderr.readline() == f"ostinato: waiting for another build in {cache}\n"
        assert not _calls(nvcc_calls)
    assert process.wait(timeout=30) == 0
    process.stderr.close()
    assert len(_calls(nvcc_calls)) == 1


def test_a_library_that_is_there_already_is_kept(cache: Path, nvcc_calls: Path) -> None:
    (item,) = _plans(1)
    (first,) = build([item])
    # Another file system view may hide the first build until the second one is finished.
    with exclusive_build(cache) as folder:
        (folder / "copy").mkdir()
        copy = folder / "copy" / "kernel.so"
        copy.write_bytes(b"second")
        cache_module.publish(first, copy)
    assert first.library.read_bytes() != b"second"
