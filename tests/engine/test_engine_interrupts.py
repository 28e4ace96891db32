"""Ctrl-C wherever it comes: nothing is half done, and the engine goes on."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ostinato.engine
from ostinato.engine import Engine, SamplingParams
from ostinato.interrupts import Uninterrupted
from tiny import byte_tokenizer, tiny_llama

PARAMS = SamplingParams(max_tokens=5, temperature=0.7, seed=4, ignore_eos=True)
PROMPTS = ["a", "a prompt of several chunks", "third", "a fourth that waits"]
_OURS = str(Path(ostinato.engine.__file__).parent)
_PLACES = 60  # at which a run is interrupted


@pytest.fixture(autouse=True)
def ordinary_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_comes_when_the_block_has_ended() -> None:
    done = []

    def interrupted() -> None:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            with Uninterrupted():
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_is_not_held_back() -> None:
    done = []

    def interrupted() -> None:
        with Uninterrupted():
            for turn in range(3):
                signal.raise_signal(signal.SIGINT)
                done.append(turn)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_comes_after_an_error_too() -> None:
    def interrupted() -> None:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("this")

    with pytest.raises(KeyboardInterrupt) as info:
        interrupted()
    assert isinstance(info.value.__context__, ValueError)


def test_a_handler_of_somebody_else_is_called_once() -> None:
    calls = []
    signal.signal(signal.SIGINT, lambda number, _frame: calls.append(number))
    with Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        assert calls == []
    assert calls == [signal.SIGINT]


def test_who_ignores_it_goes_on_to() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_are_as_they_were() -> None:
    seen = []

    def work() -> None:
        with Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def _at_lines(act: Callable[[int], None], run: Callable[[], object]) -> int:
    """Call `act` with the number of each line of the engine that `run` comes to; return it."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            count += 1
            act(count)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def _engine() -> Engine:
    engine = Engine(
        tiny_llama("cpu"),
        byte_tokenizer(),
        max_batch=2,
        page_size=4,
        num_pages=14,  # some are preempted
        max_context=40,
        prefill_chunk=8,
    )
    engine.capture(progress=False)
    return engine


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["generate", "stream", "step", "drop"])
def test_wherever_it_comes_the_engine_goes_on(how: str) -> None:
    engine = _engine()
    expected = [text.token_ids for text in engine.generate(PROMPTS, PARAMS)]

    def steps() -> None:
        ids = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        while not engine.idle:
            engine.step()
        got = [engine.result(request).token_ids for request in ids]
        assert got == expected

    def stream() -> None:
        texts: dict[int, list[int]] = {}
        with engine.stream(PROMPTS, PARAMS) as events:
            for event in events:
                if event.token_id is not None:
                    texts.setdefault(event.request_id, []).append(event.token_id)
        assert [tuple(texts[i]) for i in range(len(PROMPTS))] == expected

    def generate() -> None:
        assert [text.token_ids for text in engine.generate(PROMPTS, PARAMS)] == expected

    def drop() -> None:
        next(engine.stream(PROMPTS, PARAMS))
        assert engine.idle

    run = {"generate": generate, "stream": stream, "step": steps, "drop": drop}[how]
    lines = _at_lines(lambda _line: None, run)
    assert lines > _PLACES
    for place in range(1, lines, lines // _PLACES):

        def interrupt(line: int, place: int = place) -> None:
            if line == place:
                signal.raise_signal(signal.SIGINT)

        # Python lets go of what is raised in the end of an object, where a stream is dropped.
        with suppress(KeyboardInterrupt) if how == "drop" else pytest.raises(KeyboardInterrupt):
            _at_lines(interrupt, run)
        while not engine.idle:  # those that were submitted; streams' are cancelled
            engine.step()
        assert engine.cache.free_pages == engine.cache.usable_pages, place
        run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
