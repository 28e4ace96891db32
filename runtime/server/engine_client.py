"""The engine of another process, as a server's routes see it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..engine import StructuredOutput
from .channel import Channel, portable, unpacked
from .errors import EngineError, EngineLostError
from .jobs import Ended, Job, Message
from .metrics import EngineNumbers


class EngineClient:
    """`EngineLink` to an `EngineHost`.

    Args:
        channel: to the host. A thread reads it.
    """

    def __init__(self, channel: Channel) -> None:
        self.on_death: Callable[[], None] = lambda: None
        self._channel = channel
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of what follows
        self._error: EngineError | None = None  # why the engine takes no jobs
        self._stopping = False
        self._jobs: dict[int, Job] = {}
        self._names: dict[Job, int] = {}
        self._calls: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, name="engine", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the engine takes jobs."""
        return self._error is None

    def submit(self, job: Job) -> None:
        """Queue a job; its first message is `Accepted` or `Ended`."""
        number = next(self._numbers)
        with self._lock:
            error = self._error
            if error is None:
                self._jobs[number] = job
                self._names[job] = number
        if error is None:
            self._channel.send("submit", number, job.prompts, job.params)
        else:
            job.receiver.take([(job, [Ended(error)])])

    def cancel(self, job: Job) -> None:
        """End what is unfinished of a job, without further messages."""
        with self._lock:
            number = self._names.pop(job, None)
            if number is None:
                return
            del self._jobs[number]
        self._channel.send("cancel", number)

    def end_all(self, error: Exception) -> None:
        """End all jobs with this error."""
        self._channel.send("end_all", portable(error))

    def numbers(self) -> Future[EngineNumbers]:
        """Read the engine's numbers, between two steps of it."""
        return self._call("numbers")

    def compile_grammar(self, form: StructuredOutput) -> Future[None]:
        """Have the form of a text compiled; a future that is cancelled is forgotten."""
        return self._call("compile_grammar", form)

    def stop(self) -> None:
        """Leave the host, which ends all jobs."""
        self._stopping = True
        self._channel.close()

    def _call(self, what: str, *arguments: Any) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            error = self._error
            if error is None:
                self._calls[number] = future
        if error is None:
            future.add_done_callback(lambda done: self._forget(number, done))
            self._channel.send(what, number, *arguments)
        else:
            future.set_exception(error)
        return future

    def _forget(self, call: int, future: Future[Any]) -> None:
        if future.cancelled():
            with self._lock:
                known = self._calls.pop(call, None)
            if known is not None:
                self._channel.send("forget", call)

    def _read(self) -> None:
        while (message := self._channel.receive()) is not None:
            what, *arguments = message
            if what == "told":
                self._tell(*arguments)
            elif what == "answer":
                self._take_answer(*arguments)
            elif what == "died":
                self._die(*arguments)
                return
        self._die(EngineLostError("the engine's process has ended"))

    def _tell(self, sent: list[tuple[int, bool, list[Any]]]) -> None:
        told: dict[Any, list[tuple[Job, list[Message]]]] = {}
        with self._lock:
            for number, ended, messages in sent:
                job = self._jobs.get(number)
                if job is None:
                    continue  # it was cancelled meanwhile
                if ended:
                    del self._jobs[number], self._names[job]
                its = told.setdefault(job.receiver, [])
                its.append((job, [unpacked(message) for message in messages]))
        for receiver, jobs in told.items():
            receiver.take(jobs)

    def _take_answer(self, call: int, error: Exception | None, result: Any) -> None:
        with self._lock:
            future = self._calls.pop(call, None)
        if future is None or not future.set_running_or_notify_cancel():
            return  # it was cancelled meanwhile
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _die(self, error: EngineError) -> None:
        """End what the engine has not, and say so."""
        with self._lock:
            self._error = error
            jobs, calls = list(self._names), list(self._calls.values())
            self._jobs.clear()
            self._names.clear()
            self._calls.clear()
        for job in jobs:
            job.receiver.take([(job, [Ended(error)])])
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        if not self._stopping:
            self.on_death()
