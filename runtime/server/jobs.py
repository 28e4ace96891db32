"""What an engine is asked for by a server, and what it tells of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..engine import Completion, SamplingParams, StructuredOutput, TokenEvent
from .metrics import EngineNumbers


@dataclass(frozen=True)
class Accepted:
    """The engine has queued all prompts of a job."""


@dataclass(frozen=True)
class Ended:
    """A job ends without further events.

    Args:
        error: TypeError or ValueError of `Engine.submit`, or EngineError.
    """

    error: Exception


@dataclass(frozen=True)
class Progress:
    """One event of a job.

    Args:
        choice: the index of its prompt.
        event: of the engine.
        completion: with the last event, the whole text.
    """

    choice: int
    event: TokenEvent
    completion: Completion | None = None


Message = Accepted | Ended | Progress


class Receiver(Protocol):
    """Takes what is told of jobs, in the engine's thread; jobs of equal receivers in one call."""

    def take(self, told: list[tuple[Job, list[Message]]]) -> None:
        """Take the messages of one step, by job."""


@dataclass(frozen=True)
class OnLoop:
    """Receiver that delivers on an asyncio loop.

    Args:
        loop: on which `Job.deliver` is called.
    """

    loop: asyncio.AbstractEventLoop

    def take(self, told: list[tuple[Job, list[Message]]]) -> None:
        """Have the messages delivered; nobody waits for those of a loop that is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_deliver, told)


def _deliver(told: list[tuple[Job, list[Message]]]) -> None:
    for job, messages in told:
        job.deliver(messages)


@dataclass(eq=False)
class Job:
    """Prompts that are submitted together.

    Args:
        prompts: token ids of each.
        params: of each.
        receiver: of its messages.
        deliver: is called by the receiver with those of one step.
    """

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    receiver: Receiver
    deliver: Callable[[list[Message]], None]
    # Of the engine's thread: its ids of unfinished prompts.
    ids: set[int] = field(default_factory=set)


class EngineLink(Protocol):
    """An engine that serves jobs: in a thread of this process, or in another process.

    Attributes:
        on_death: called, in any thread, when an error ends the engine, after all jobs have been
            told.
    """

    on_death: Callable[[], None]

    @property
    def alive(self) -> bool:
        """Whether the engine takes jobs."""

    def submit(self, job: Job) -> None:
        """Queue a job; its first message is `Accepted` or `Ended`."""

    def cancel(self, job: Job) -> None:
        """End what is unfinished of a job, without further messages."""

    def end_all(self, error: Exception) -> None:
        """End all jobs with this error."""

    def numbers(self) -> concurrent.futures.Future[EngineNumbers]:
        """Read the engine's numbers between two steps; EngineError where there is no engine."""

    def compile_grammar(self, form: StructuredOutput) -> concurrent.futures.Future[None]:
        """Compile the form of a text, which may take seconds, before its job is submitted.

        One that is kept from before does not wait for others. The future's errors are ValueError
        for a form that cannot be followed, RuntimeError when xgrammar is not installed, EngineError
        when there is no engine.
        """

    def stop(self) -> None:
        """End all jobs, and what serves them on this side."""
