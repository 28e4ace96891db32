"""Ctrl-C wherever it comes: nothing is half done, and the engine goes on."""

from __future__ import annotations

import linecache
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
from effort import effort
from ostinato import interrupts
from ostinato.engine import Engine, SamplingParams, TokenEvent
from ostinato.graphs import NotCapturedError
from ostinato.interrupts import Uninterrupted
from tiny import byte_tokenizer, tiny_llama

PARAMS = SamplingParams(max_tokens=5, temperature=0.7, seed=4, ignore_eos=True)
PROMPTS = ["a", "a prompt of several chunks", "third", "a fourth that waits"]
_ENGINE = Path(ostinato.engine.__file__).parent
_OURS = tuple(str(_ENGINE.parent / place) for place in ("engine/", "models/cache", "models/pages"))


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


def _interrupted_thrice(done: list[int]) -> None:
    with Uninterrupted():
        for turn in range(3):
            signal.raise_signal(signal.SIGINT)
            done.append(turn)


@pytest.mark.parametrize(("apart", "turns"), [(0.0, [0]), (60.0, [0, 1, 2])])
def test_a_second_interrupt_is_raised_at_once(
    apart: float, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "APART_S", apart)
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        _interrupted_thrice(done)
    assert done == turns
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _interrupted_at(target: int, *, held: bool) -> tuple[bool, bool]:
    """Enter and leave a block with Ctrl-C at its target-th line; whether it came there, and at all.

    With `held` another one is held back before.
    """
    lines, came, raised = 0, False, False

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines, came
        code = frame.f_code
        if code.co_filename != interrupts.__file__ or code.co_name == "_hold":
            return None
        if event in ("line", "call"):
            lines += 1
            if lines == target:
                came = True
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    try:
        try:
            with Uninterrupted():
                if held:
                    signal.raise_signal(signal.SIGINT)
                sys.settrace(trace)
        finally:
            sys.settrace(before)
    except KeyboardInterrupt:
        raised = True
    return came, raised


@pytest.mark.parametrize("held", [False, True])
def test_an_interrupt_at_the_end_of_a_block_is_raised(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "APART_S", 0.0)
    for target in range(1, 100):
        came, raised = _interrupted_at(target, held=held)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, target
        if not came:
            break
        assert raised, target
    assert target > 5


def test_it_comes_after_an_error_too() -> None:
    def interrupted() -> None:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("this")

    with pytest.raises(KeyboardInterrupt) as info:
        interrupted()
    assert isinstance(info.value.__context__, ValueError)


def _nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, _nothing], ids=["ignored", "a handler"])
def test_where_it_raises_nothing_all_is_as_it_was(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with Uninterrupted():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    with Uninterrupted():
        signal.signal(signal.SIGINT, _nothing)
    assert signal.getsignal(signal.SIGINT) is _nothing


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
    """Call `act` with the number of each line of ours that `run` comes to; return it.

    Not of returns: there Python does not look for signals.
    """
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            return None
        text = linecache.getline(file, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith("return "):
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


def _interrupt_everywhere(
    run: Callable[[], None], after: Callable[[int], None], places: int
) -> None:
    run()
    after(0)
    lines = _at_lines(lambda _line: None, run)
    after(0)
    for place in range(1, lines + 1, max(lines // places, 1)):
        reached = raised = False

        def interrupt(line: int, place: int = place) -> None:
            nonlocal reached
            if line == place:
                reached = True
                signal.raise_signal(signal.SIGINT)

        try:
            _at_lines(interrupt, run)
        except KeyboardInterrupt:
            raised = True
        assert raised == reached, place
        after(place)
    assert place > 0.8 * lines
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("how", "places"),
    [("generate", effort(10, 50)), ("stream", effort(10, 50)), ("drop", effort(30, 300))],
)
def test_streams_leave_nothing_wherever_it_comes(how: str, places: int) -> None:
    engine = _engine()
    expected = [text.token_ids for text in engine.generate(PROMPTS, PARAMS)]

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

    def nothing_is_left(place: int) -> None:
        assert engine.idle, place
        assert not engine._requests, place
        assert not engine._queues, place
        assert not engine._streams, place
        assert engine.cache.free_pages == engine.cache.usable_pages, place

    run = {"generate": generate, "stream": stream, "drop": drop}[how]
    _interrupt_everywhere(run, nothing_is_left, places)
    generate()


def test_no_event_is_lost_wherever_it_comes() -> None:
    engine = _engine()
    expected = [text.token_ids for text in engine.generate(PROMPTS, PARAMS)]
    ids: list[int] = []
    events: list[TokenEvent] = []

    def run() -> None:
        for prompt in PROMPTS[len(ids) :]:
            ids.append(engine.submit(prompt, PARAMS))
        while not engine.idle:
            events.extend(engine.step())

    def all_came(place: int) -> None:
        run()
        for request, tokens in zip(ids, expected, strict=True):
            mine = [e for e in events if e.request_id == request]
            assert tuple(e.token_id for e in mine) == tokens, place
            assert mine[-1].finish_reason is not None, place
            assert engine.result(request).token_ids == tokens, place
        assert not engine._requests, place
        assert engine.cache.free_pages == engine.cache.usable_pages, place
        ids.clear()
        events.clear()

    _interrupt_everywhere(run, all_came, effort(10, 60))


def test_wherever_it_comes_graphs_can_be_captured_again() -> None:
    engine = _engine()

    def capture() -> None:
        engine.capture([1, 2], progress=False)

    def nothing_is_lent(place: int) -> None:
        with suppress(NotCapturedError):
            engine.step()
        assert engine.cache.free_pages == engine.cache.usable_pages, place

    _interrupt_everywhere(capture, nothing_is_lent, effort(20, 300))
    capture()
    assert engine.generate(["abc"], PARAMS)[0].token_ids
