"""Runs compilers side by side, through one build.ninja."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .resources import job_limit
from .toolchain import compiler_environment, find_ninja

_JOB_GIB = 1  # the measured peak of one compiler, rounded up

_MARK = "finished "


@dataclass(frozen=True)
class Job:
    """One compiler run.

    Args:
        name: of the folder, below that of the build, in which it runs.
        command: argument vector; it makes `UNCHECKED` there, and what it says goes to `LOG`.
        output: what `UNCHECKED` is renamed to when the command has succeeded.
    """

    name: str
    command: Sequence[str]
    output: str


LOG = "log.txt"
START = "start"
# A linker on a full disk may fail and leave a piece of a library.
UNCHECKED = "unchecked"


def run(
    folder: Path, jobs: Sequence[Job], ended: Callable[[str], None], limit: int | None = None
) -> str:
    """Run all jobs, going on after failures, and return what ninja said about the failed ones.

    Args:
        folder: empty, for build.ninja and the jobs' folders.
        jobs: with names of their own.
        ended: called with the name of each job as it ends, well or not.
        limit: of jobs that run at once; by default as many as cores and memory allow.

    Raises:
        KernelBuildError: when there is no ninja.
    """
    ninja = find_ninja()
    for job in jobs:
        (folder / job.name).mkdir()
    # Paths may have bytes that are no text.
    (folder / "build.ninja").write_bytes(os.fsencode(_build_file(jobs)))
    environment = compiler_environment()
    # Temporary files of a killed compiler go with the folder of its job, where it runs. No path:
    # nvcc would give it to a shell as it is.
    environment.update(NINJA_STATUS=_MARK, TMPDIR=".", TERM="dumb")
    said = []
    with subprocess.Popen(
        [ninja, "-C", folder, "-k", "0", "-j", str(job_limit(_JOB_GIB, limit))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(_MARK):
                    ended(line.removeprefix(_MARK).strip())
                else:
                    said.append(line)
        except BaseException:
            # Ninja ends its compilers when it is asked to end.
            process.terminate()
            raise
    return "".join(said)


def _build_file(jobs: Sequence[Job]) -> str:
    lines = [
        "rule compile",
        f"  command = cd $name && : > {START} && $compiler > {LOG} 2>&1 && mv {UNCHECKED} $output",
        "  description = $name",
    ]
    for job in jobs:
        lines += [
            f"build {job.name}/{job.output}: compile",
            f"  name = {job.name}",
            f"  output = {job.output}",
            f"  compiler = {_escape(job.command)}",
        ]
    return "\n".join(lines) + "\n"


def _escape(command: Sequence[str]) -> str:
    return shlex.join(command).replace("$", "$$")
