"""The command line as a whole: help, exit codes, errors in one line, Ctrl-C and broken pipes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from effort import sampled
from ostinato import __version__
from ostinato.cli.command import Command, UserError, comma_separated, user_errors
from ostinato.cli.main import COMMANDS, main
from ostinato.graphs import CaptureError, VerificationError
from ostinato.jit.errors import KernelBuildError, MissingKernelError

LONG = ("--max-tokens", "50000", "--ignore-eos", "--no-verify")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "command", [(), ("generate",), ("quantize",), ("env",), ("bench",), ("bench", "step")]
)
def test_help_of_every_command(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m ostinato {' '.join(command)}".strip() in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"ostinato {__version__}\n"


def test_commands_are_imported_without_torch() -> None:
    code = "import sys, ostinato.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "ostinato: error: got nothing, expected generate or chat or serve or"),
        (["sing"], "ostinato: error: got sing, expected generate or"),
        (["--loud"], "ostinato: error: unrecognized arguments: --loud (see --help)"),
        (["generate"], "ostinato generate: error: the following arguments are required: MODEL"),
        (["bench"], "ostinato bench: error: the following arguments are required: SECTION"),
        (["env", "now"], "ostinato env: error: unrecognized arguments: now"),
    ],
)
def test_bad_command_lines_are_refused_in_one_line(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(error)
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("size: got 0,\n  expected 1"), "size: got 0, expected 1"),
        (FileNotFoundError(2, "No such file", "a/b"), "a/b: No such file"),
        (OSError("no space"), "no space"),
        (MemoryError(), "out of memory"),
        (ValueError(), "ValueError"),
    ],
)
def test_user_errors_become_one_line(error: Exception, message: str) -> None:
    with (
        pytest.raises(UserError) as raised,
        user_errors(ValueError, OSError, MemoryError),
    ):
        raise error
    assert str(raised.value) == message
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BrokenPipeError(32, "Broken pipe")])
def test_other_errors_pass_through(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, user_errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    "error",
    [
        MissingKernelError("kernel k is not compiled: run `python -m ostinato build --only k`"),
        KernelBuildError("k (release):\nprobe.cu(1): error: no such thing"),
        CaptureError("could not capture batch size 8: RuntimeError: no\n  remedy: none"),
        VerificationError("batch size 8: the replay differs"),
    ],
)
def test_what_kernels_and_captures_say_is_shown_in_all_its_lines(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_arguments: object) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "generate", Command("", fail))
    assert main(["generate"]) == 1
    assert capsys.readouterr().err == f"ostinato generate: error: {error}\n"


def test_comma_separated() -> None:
    assert comma_separated("1,-2,30") == [1, -2, 30]
    assert comma_separated("") == []


@pytest.mark.parametrize(
    ("command", "code", "error"),
    sampled(
        [
            ("generate {} <&-", 2, "stdin: got no prompt"),
            ("generate {} - <&-", 2, "stdin: got no prompt"),
            ("env >&-", 0, ""),
            ("generate {} x --max-tokens 2 --no-verify >&-", 0, "decode "),
            ("env --json 2>&-", 0, ""),
            ("sing 2>&-", 2, ""),
            ("env <&- >&- 2>&-", 0, ""),
        ],
        3,
    ),
)
def test_standard_streams_may_be_closed(
    command: str, code: int, error: str, checkpoint: Path
) -> None:
    script = f"{sys.executable} -m ostinato {command.format(checkpoint)}"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert done.returncode == code
    assert error in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    sampled(
        list(product(["env", "generate {} x --max-tokens 2 --no-verify"], ["", "1"])),
        3,
    ),
)
def test_a_full_disk_is_an_error_in_one_line(
    command: str, unbuffered: str, checkpoint: Path
) -> None:
    script = f"{sys.executable} -m ostinato {command.format(checkpoint)} >/dev/full"
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("error: [Errno 28] No space left on device\n")


def test_a_file_that_cannot_grow_is_a_failure(checkpoint: Path, tmp_path: Path) -> None:
    command = f"quantize {checkpoint} {tmp_path / 'new'} --scheme int8"
    script = f"ulimit -f 8; {sys.executable} -m ostinato {command}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == "ostinato quantize: error: [Errno 27] File too large\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (UserError("no"), 2), (RuntimeError(), None)]
)
def test_what_was_printed_before_an_error_is_written(
    error: BaseException, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_arguments: object) -> int:
        print("partial")
        raise error

    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written))
    monkeypatch.setitem(COMMANDS, "env", Command("", fail))
    if code is None:
        with pytest.raises(type(error)):
            main(["env"])
    else:
        assert main(["env"]) == code
    assert written.getvalue() == b"partial\n"


@pytest.fixture
def endless(checkpoint: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a generation far longer than any test waits for."""
    command = [sys.executable, "-m", "ostinato", "generate", str(checkpoint), "Hello", *LONG]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_ends_a_generation(endless: subprocess.Popen[bytes]) -> None:
    shown = endless.stdout.read(1)
    endless.send_signal(signal.SIGINT)
    rest, errors = endless.communicate(timeout=60)
    assert endless.returncode == 130
    assert b"Traceback" not in errors
    assert b"decode " in errors
    assert (shown + rest).endswith(b"\n")


def test_ctrl_c_works_in_a_background_job(checkpoint: Path) -> None:
    # A shell without job control starts `command &` with SIGINT ignored.
    script = (
        f"{sys.executable} -m ostinato generate {checkpoint} Hello {' '.join(LONG)} >text & "
        "while kill -0 $! && ! test -s text; do sleep 0.05; done; kill -INT $!; wait $!"
    )
    folder = checkpoint.parent
    done = subprocess.run(["sh", "-c", script], cwd=folder, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 130


def test_ctrl_c_before_anything_is_ready(checkpoint: Path) -> None:
    # With a pipe for its prompts that nobody writes to, the command waits.
    process = subprocess.Popen(
        [sys.executable, "-m", "ostinato", "generate", str(checkpoint), "-", "--no-verify"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "PYTHONVERBOSE": "1"},
    )
    try:
        # Python names each module that it imports: this one is the last before the wait.
        while b"ostinato.cli.main'" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_a_closed_pipe_ends_a_generation_quietly(endless: subprocess.Popen[bytes]) -> None:
    endless.stdout.read(1)
    endless.stdout.close()
    errors = endless.stderr.read()
    assert endless.wait(timeout=60) == 128 + signal.SIGPIPE
    assert b"Error" not in errors
