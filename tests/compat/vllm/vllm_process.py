"""Processes with an engine of vLLM each (vllm_engine.py): started at once, asked one at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

_ENGINE = Path(__file__).with_name("vllm_engine.py")
# One process is the whole engine, nothing is asked of a network, and the sampler is vLLM's own.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}


class EngineError(Exception):
    """An engine ended, or did not answer in time."""


@dataclass(frozen=True, eq=False)
class Variant:
    """How an engine is started. One is no other's equal, so that they can be keys.

    Args:
        parts: of the plug-in that serve; none is vLLM alone.
        arguments: of `vllm.LLM`, beside those of all engines.
        environment: likewise.
        differs: of vLLM alone, what it does otherwise than by default.
    """

    parts: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    differs: str = ""

    def __str__(self) -> str:
        """Return the name that lines of output have."""
        return self.parts or self.differs or "vLLM alone"


class EngineProcess:
    """A process with an engine; its output goes to a file.

    Args:
        variant: how it is started.
        arguments: of `vllm.LLM`.
        folder: for its output and its caches, which no other engine shares.
    """

    def __init__(self, variant: Variant, arguments: Mapping[str, Any], folder: Path) -> None:
        self.ready: dict[str, Any] = {}
        self.log = folder / "log.txt"
        folder.mkdir(parents=True)
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            **variant.environment,
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_CONFIG_ROOT": str(folder / "config"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        self._connection, theirs = Pipe()
        given = {"arguments": {**arguments, **variant.arguments}}
        with theirs, self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_ENGINE), str(theirs.fileno()), json.dumps(given)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def wait_ready(self, until: float) -> None:
        """Wait until the engine has started.

        Args:
            until: of `time.monotonic`.

        Raises:
            EngineError: when it has not by then.
        """
        self.ready = self._answer("ready", until)

    def ask(self, what: str, seconds: float, **arguments: Any) -> Any:
        """Return what a method of `vllm_engine.Served` returns.

        Raises:
            EngineError: when the process ends, or does not answer in so many seconds.
        """
        try:
            self._connection.send((what, arguments))
        except OSError as error:
            raise self._ended(f"{what}: {error}") from None
        return self._answer(what, time.monotonic() + seconds)

    def close(self) -> None:
        """End the process and all that it has started."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self, what: str, until: float) -> Any:
        try:
            if not self._connection.poll(max(0.0, until - time.monotonic())):
                raise self._ended(f"{what}: no answer in time")
            answered, found = self._connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)  # until it has said why
            raise self._ended(f"{what}: the process ended") from None
        if answered != what:
            raise self._ended(f"got an answer to {answered!r}, expected {what!r}")
        return found

    def _ended(self, reason: str) -> EngineError:
        self.close()
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return EngineError("\n".join([reason, *(line[:300] for line in lines[-25:])]))


class Engines:
    """Engines of one part, started at once. Those that fail are left out, which is said.

    Args:
        variants: one for each.
        arguments: of `vllm.LLM`, for all.
        folder: for what they write.
        start_seconds: in which all must have started.
        ask_seconds: in which each must answer.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        arguments: Mapping[str, Any],
        folder: Path,
        *,
        start_seconds: float,
        ask_seconds: float,
    ) -> None:
        self.failed: list[str] = []
        self._ask_seconds = ask_seconds
        self._running = {
            variant: EngineProcess(variant, arguments, folder / f"engine{i}")
            for i, variant in enumerate(variants)
        }
        until = time.monotonic() + start_seconds
        for variant, process in list(self._running.items()):
            try:
                process.wait_ready(until)
            except EngineError as error:
                self._drop(variant, error)
            else:
                print(f"{variant}: {process.ready}", flush=True)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.close()

    def running(self) -> list[Variant]:
        """Return those that have not failed."""
        return list(self._running)

    def ready(self, variant: Variant) -> dict[str, Any]:
        """Return what an engine said of itself when it had started."""
        return self._running[variant].ready

    def ask(self, variant: Variant, what: str, **arguments: Any) -> Any:
        """Return what an engine answers, None where it has failed, now or before."""
        process = self._running.get(variant)
        if process is None:
            return None
        try:
            return process.ask(what, self._ask_seconds, **arguments)
        except EngineError as error:
            self._drop(variant, error)
            return None

    def _drop(self, variant: Variant, error: EngineError) -> None:
        self.failed.append(f"{variant}: the engine failed")
        print(f"--- {variant} failed: {error}", file=sys.stderr, flush=True)
        del self._running[variant]
