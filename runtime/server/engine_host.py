"""An engine's thread, for the process at the other end of a channel."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .channel import Channel, packed, portable
from .engine_thread import EngineThread
from .errors import EngineError
from .jobs import Job, Message


@dataclass(eq=False)
class _RemoteJob(Job):
    """A job whose messages the channel takes; `number` names it there."""

    number: int = -1


class EngineHost:
    """Does what an `EngineClient` asks for.

    Args:
        engine: has been started.
        channel: to the client.
    """

    def __init__(self, engine: EngineThread, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._jobs: dict[int, _RemoteJob] = {}
        self._compiling: dict[int, Future[None]] = {}

    def run(self) -> None:
        """Serve until the client goes; then end all jobs."""
        self._engine.on_death = self._tell_death
        if not self._engine.alive:  # since before anybody was told
            self._tell_death()
        while (message := self._channel.receive()) is not None:
            self._do(*message)
        self._engine.end_all(EngineError("the server is stopping"))
        for future in list(self._compiling.values()):
            future.cancel()

    def take(self, told: list[tuple[Job, list[Message]]]) -> None:
        """Send the messages of a step; of each job whether it has ended."""
        sent = []
        for job, messages in told:
            assert isinstance(job, _RemoteJob)
            ended = not job.ids
            if ended:
                self._jobs.pop(job.number, None)
            sent.append((job.number, ended, [packed(message) for message in messages]))
        self._channel.send("told", sent)

    def _do(self, what: str, *arguments: Any) -> None:
        if what == "submit":
            number, prompts, params = arguments
            job = _RemoteJob(prompts, params, self, _not_here, number=number)
            self._jobs[number] = job
            self._engine.submit(job)
        elif what == "cancel":
            (number,) = arguments
            if (found := self._jobs.pop(number, None)) is not None:
                self._engine.cancel(found)
        elif what == "end_all":
            self._engine.end_all(*arguments)
        elif what == "numbers":
            (call,) = arguments
            self._engine.numbers().add_done_callback(lambda future: self._answer(call, future))
        elif what == "compile_grammar":
            call, form = arguments
            self._compiling[call] = done = self._engine.compile_grammar(form)
            done.add_done_callback(lambda future: self._answer(call, future))
        elif what == "forget":
            (call,) = arguments
            if (compiling := self._compiling.get(call)) is not None:
                compiling.cancel()

    def _answer(self, call: int, future: Future[Any]) -> None:
        self._compiling.pop(call, None)
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._channel.send("answer", call, None, future.result())
        else:
            self._channel.send("answer", call, portable(error), None)

    def _tell_death(self) -> None:
        self._channel.send("died", self._engine.error)


def _not_here(messages: list[Message]) -> None:
    raise AssertionError("messages of a remote job are sent to its client")
