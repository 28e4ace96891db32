"""The thread that owns the engine: jobs go in from other threads, events come back."""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TypeVar

import torch

from ostinato.graphs import RankError

from ..engine import Completion, Engine, StructuredOutput
from .errors import EngineError, EngineLostError
from .jobs import Accepted, Ended, Job, Message, Progress
from .metrics import EngineNumbers

_LOG = logging.getLogger("ostinato.server")
# Failing steps in a row after which the newest request is taken for their cause.
_PATIENCE = 3
_LAST_S = 2.0  # for a thread that a lost rank holds up, before the server ends without it

T = TypeVar("T")
# What the thread is asked for; without an engine, that it will not be done.
Command = Callable[[Engine | None], None]


class EngineThread:
    """Makes an engine in a thread of its own and steps it while there is work; an `EngineLink`.

    Args:
        make_engine: returns a captured engine. It is called in the thread, which owns the engine.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._made: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        # A daemon: where a step hangs, the process must still be able to end.
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._live: dict[int, tuple[Job, int]] = {}
        self._compiler = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._failures = 0
        self._outbox: dict[Job, list[Message]] = {}
        self._stopped = threading.Event()
        self._dying = threading.Lock()
        self._handing_out = threading.Lock()
        self._lost: EngineLostError | None = None
        self.on_death: Callable[[], None] = lambda: None

    def start(self) -> Engine:
        """Start the thread and wait for the engine, whose attributes may be read but not changed.

        Raises:
            Exception: what `make_engine` raises.
        """
        self._thread.start()
        return self._made.result()

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._made.done() and self._thread.is_alive() and not self._stopped.is_set()

    @property
    def error(self) -> EngineError:
        """Why the engine takes no jobs, once it does not."""
        return self._lost or EngineError("the engine has stopped")

    def submit(self, job: Job) -> None:
        """Queue a job; its first message is `Accepted` or `Ended`."""

        def submit(engine: Engine | None) -> None:
            if engine is None:
                self._say(job, Ended(self.error))
            else:
                self._submit(engine, job)

        self._post(submit)

    def cancel(self, job: Job) -> None:
        """End what is unfinished of a job, without further messages."""
        self._post(lambda engine: None if engine is None else self._cancel(engine, job))

    def end_all(self, error: Exception) -> None:
        """End all jobs with this error."""

        def end(engine: Engine | None) -> None:
            if engine is not None:
                for job in {job for job, _ in self._live.values()}:
                    self._end(engine, job, error)

        self._post(end)

    def call(self, function: Callable[[Engine], T]) -> concurrent.futures.Future[T]:
        """Call a function with the engine, between two steps of it."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run(engine: Engine | None) -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                if engine is None:
                    raise EngineError("the engine has stopped")
                result.set_result(function(engine))
            except Exception as error:
                result.set_exception(error)

        self._post(run)
        return result

    def numbers(self) -> concurrent.futures.Future[EngineNumbers]:
        """Read the engine's numbers, between two steps of it."""
        return self.call(EngineNumbers.of)

    def compile_grammar(self, form: StructuredOutput) -> concurrent.futures.Future[None]:
        """Compile the form of a text in a thread of its own, so that `submit` finds it done."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        grammars = self._made.result().grammars
        if grammars is None or grammars.keeps(form):  # without any, `submit` refuses the form
            done.set_result(None)
            return done

        def compiled() -> None:
            grammars.compile(form)

        try:
            return self._compiler.submit(compiled)
        except RuntimeError:  # it has been shut down
            done.set_exception(EngineError("the engine has stopped"))
            return done

    def stop(self) -> None:
        """End all jobs and the thread, and release the engine.

        Once a rank is lost, the thread is waited for two seconds at most: it may be stuck.
        """
        self.end_all(EngineError("the server is stopping"))
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._inbox.put(None)
        self._thread.join(None if self._lost is None else _LAST_S)

    def abandon(self, error: RankError) -> None:
        """End all jobs because a rank is lost, from another thread: the engine's may be stuck."""
        if not self._made.done() or self._stopped.is_set():
            return
        _LOG.error("a rank is lost: %s", error)
        self._die(EngineLostError(str(error)))
        self._inbox.put(None)

    def _post(self, command: Command) -> None:
        self._inbox.put(command)
        # Asked after the command is in: either the thread takes it, or it is refused here.
        if self._stopped.is_set():
            self._refuse_all()

    def _main(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._stopped.set()
            self._made.set_exception(error)
            return
        self._made.set_result(engine)
        try:
            with closing(engine):
                self._serve(engine)
        except RankError as error:
            self.abandon(error)
        except Exception:
            _LOG.exception("the engine has failed for good")
            self._die(EngineError("the engine has failed"))
        finally:
            self._stopped.set()
            self._refuse_all()

    def _die(self, error: EngineError) -> None:
        """End all jobs and refuse others, once, and say so; in the engine's thread or another."""
        with self._dying:
            if self._stopped.is_set():
                return
            if isinstance(error, EngineLostError):
                self._lost = error
            self._stopped.set()
        for job in {job for job, _ in list(self._live.values())}:
            self._say(job, Ended(error))
        self._refuse_all()
        self.on_death()

    def _serve(self, engine: Engine) -> None:
        while True:
            # One command at least where there is nothing else to do.
            while engine.idle or not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    return
                command(engine)
                self._flush()
            self._step(engine)
            self._flush()

    def _step(self, engine: Engine) -> None:
        try:
            events = engine.step()
        except (torch.AcceleratorError, RankError):
            raise  # the device's context is lost, and with it every request
        except Exception:
            self._failures += 1
            _LOG.exception("a step of the engine has failed, %d in a row", self._failures)
            if self._failures >= _PATIENCE and self._live:
                # What came last is the likeliest cause; where it is not, the next one goes.
                job, _ = self._live[max(self._live)]
                self._end(engine, job, EngineError("a step has failed"))
            return
        self._failures = 0
        for event in events:
            if event.request_id not in self._live:
                continue  # it was ended after a step that failed
            job, choice = self._live[event.request_id]
            completion = None
            if event.finish_reason is not None:
                completion = self._forget(engine, event.request_id)
            self._say(job, Progress(choice, event, completion))

    def _submit(self, engine: Engine, job: Job) -> None:
        try:
            for choice, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True)):
                number = engine.submit(prompt, params)
                self._live[number] = (job, choice)
                job.ids.add(number)
        except (TypeError, ValueError) as error:
            self._end(engine, job, error)
        else:
            self._say(job, Accepted())

    def _cancel(self, engine: Engine, job: Job) -> None:
        for number in list(job.ids):
            with suppress(ValueError):  # it has finished in a step that failed
                engine.cancel(number)
            self._forget(engine, number)

    def _end(self, engine: Engine, job: Job, error: Exception) -> None:
        self._cancel(engine, job)
        self._say(job, Ended(error))

    def _forget(self, engine: Engine, number: int) -> Completion:
        job, _ = self._live.pop(number)
        job.ids.discard(number)
        return engine.result(number)

    def _say(self, job: Job, message: Message) -> None:
        with self._handing_out:
            self._outbox.setdefault(job, []).append(message)

    def _flush(self) -> None:
        """Hand out what has come, with one call per receiver."""
        with self._handing_out:
            outbox, self._outbox = self._outbox, {}
        for receiver in {job.receiver for job in outbox}:
            receiver.take([(job, its) for job, its in outbox.items() if job.receiver == receiver])

    def _refuse_all(self) -> None:
        """Answer commands that come when the engine serves no more."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                command(None)
        self._flush()
