"""The engine of another rank than 0: it does what rank 0's engine is called for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..request import Request
from ..sampling_params import SamplingParams, TokenEvent
from ..structured.grammar import GrammarCompiler
from .calls import STEP, RankCalls
from .requests import ReceivedGrammars, received_params

Details = dict[str, Any]


class Followed(Protocol):
    """What of an engine rank 0's calls come to."""

    grammars: GrammarCompiler | None

    def capture(self, batch_sizes: Sequence[int] | None, *, progress: bool, verify: bool) -> object:
        """As of `Engine`."""

    def sleep(self) -> None:
        """As of `Engine`."""

    def wake(self, *, progress: bool, verify: bool) -> object:
        """As of `Engine`."""

    def step(self) -> list[TokenEvent]:
        """As of `Engine`."""

    def cancel(self, request_id: int) -> TokenEvent:
        """As of `Engine`."""

    def result(self, request_id: int) -> object:
        """As of `Engine`."""

    def close(self) -> None:
        """As of `Engine`."""


def follow(
    engine: Followed,
    calls: RankCalls,
    make: Callable[[list[int], SamplingParams, ReceivedGrammars | None], Request],
    queue: Callable[[Request], object],
    fail: Callable[[int], object],
) -> None:
    """Do the calls of rank 0 with an engine of this rank, until it, or rank 0, is closed.

    Texts are for rank 0 to hand out: here requests are forgotten as soon as they end.

    Args:
        engine: of this rank.
        calls: where rank 0's come from.
        make: makes a request of a prompt, its parameters, and the grammars of an engine that
            processes logits.
        queue: queues it.
        fail: ends a request, whose last event the next step returns.
    """
    grammars = None if engine.grammars is None else ReceivedGrammars(engine.grammars)
    with calls.following():
        while received := calls.receive():
            for name, details in received:
                if name == "close":
                    engine.close()
                    return
                if name == "submit":
                    if grammars is not None:
                        grammars.take(details)
                    queue(make(details["prompt"], received_params(details), grammars))
                elif name == "fail":
                    fail(details["request_id"])
                else:
                    _do(engine, name, details)


def _do(engine: Followed, name: str, details: Details) -> None:
    if name == STEP:
        for event in engine.step():
            if event.finish_reason is not None:
                engine.result(event.request_id)
    elif name == "cancel":
        engine.cancel(details["request_id"])
        engine.result(details["request_id"])
    elif name == "capture":
        engine.capture(details["batch_sizes"], progress=False, verify=details["verify"])
    elif name == "wake":
        engine.wake(progress=False, verify=details["verify"])
    else:
        assert name == "sleep", name
        engine.sleep()
