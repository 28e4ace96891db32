"""Runs cases of `rank_cases` in forks of one process: importing torch takes seconds, a fork none.

Run as a file, without any thread: each line of standard input is a case, each line of standard
output what its ranks have reported.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

LONGEST_S = 120.0  # of a case, on a busy machine; what takes longer hangs


class Forks:
    """A process whose forks run cases; to be closed.

    Args:
        at_once: cases that run side by side.
    """

    def __init__(self, at_once: int) -> None:
        tests = Path(__file__).parents[1]
        paths = [str(tests), str(tests / "parallel"), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(at_once)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(paths),
                # Else asking for GPUs would begin what a fork cannot go on with.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                # A rank that connects to the store has torch ask a name server for that host.
                "RES_OPTIONS": "timeout:1 attempts:1",
            },
            text=True,
        )
        self._reports: list[Future[dict[str, Any]]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, case: dict[str, Any]) -> Future[dict[str, Any]]:
        """Run a case; its report has a list `ranks`.

        Each has `code`, the exit code, None where the rank had to be killed; `told`, what it has
        written; and `stderr`, the end of it.
        """
        assert self._process.stdin is not None
        self._reports.append(Future())
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self._reports[-1]

    def close(self) -> None:
        """End the process, once all cases have."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(LONGEST_S) == 0

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, report = json.loads(line)
            self._reports[number].set_result(report)
        for report in self._reports:
            if not report.done():
                report.set_exception(RuntimeError("the process of the forks has ended"))


def run_cases(cases: Sequence[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
    """Return what each case has reported."""
    with closing(Forks(at_once)) as forks:
        return [future.result() for future in [forks.run(case) for case in cases]]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(int(LONGEST_S / 0.02)):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.02)


class _Case:
    """A case under way: a process for each rank, and one for the store if no rank holds it."""

    def __init__(self, number: int, case: dict[str, Any], folder: Path) -> None:
        self.number, self.case, self.folder = number, case, folder
        self.started = time.monotonic()
        folder.mkdir()
        port = str(_free_port())
        self.keeper = self._fork(None, port) if case.get("keeper") else None
        if self.keeper is not None:
            _wait_for(int(port))
        self.ranks = {rank: self._fork(rank, port) for rank in range(case["size"])}
        self.codes: dict[int, int | None] = {}

    def _fork(self, rank: int | None, port: str) -> int:
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if rank is None:
                import rank_cases

                rank_cases.keep_store(int(port))
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(self.case["size"])}
            if self.case.get("keeper"):
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            errors = os.open(self.folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT)
            os.dup2(errors, 2)
            os.dup2(2, 1)
            from rank_cases import run_rank

            os.close(0)
            code = run_rank(self.case, self.folder / f"{rank}.report")
        finally:
            os._exit(code)

    def ended(self) -> bool:
        """Reap what has ended; whether that is all. A rank that was stopped ends with the rest."""
        for rank, process in self.ranks.items():
            if rank not in self.codes:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        left = set(self.ranks) - set(self.codes)
        fault = self.case.get("fault") or {}
        late = time.monotonic() - self.started > LONGEST_S
        if late or (left == {fault.get("rank")} and fault["kind"] == "stop"):
            for rank in left:
                os.kill(self.ranks[rank], signal.SIGKILL)
                os.waitpid(self.ranks[rank], 0)
                self.codes[rank] = None
            left = set()
        if not left and self.keeper is not None:
            os.kill(self.keeper, signal.SIGKILL)
            os.waitpid(self.keeper, 0)
            self.keeper = None
        return not left

    def report(self) -> dict[str, Any]:
        ranks = []
        for rank in self.ranks:
            file = self.folder / f"{rank}.report"
            lines = file.read_text().splitlines() if file.exists() else []
            told = [json.loads(line) for line in lines if line.endswith("}")]
            ranks.append(
                {
                    "code": self.codes[rank],
                    "told": told,
                    "stderr": (self.folder / f"{rank}.stderr").read_text()[-6000:],
                }
            )
        return {"case": self.case, "ranks": ranks, "seconds": time.monotonic() - self.started}


def _main(at_once: int) -> None:
    import rank_cases  # noqa: F401  # before the forks

    lines, rest, count = sys.stdin.fileno(), b"", 0
    waiting: list[tuple[int, dict[str, Any]]] = []
    running: list[_Case] = []
    is_open = True
    with tempfile.TemporaryDirectory() as folder:
        while is_open or waiting or running:
            if is_open and select.select([lines], [], [], 0.02)[0]:
                read = os.read(lines, 1 << 16)
                is_open = bool(read)
                *whole, rest = (rest + read).split(b"\n")
                for line in whole:
                    waiting.append((count, json.loads(line)))
                    count += 1
            elif not is_open:
                time.sleep(0.02)
            while waiting and len(running) < at_once:
                number, case = waiting.pop(0)
                running.append(_Case(number, case, Path(folder) / str(number)))
            for under_way in [each for each in running if each.ended()]:
                running.remove(under_way)
                print(json.dumps([under_way.number, under_way.report()]), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
