"""An engine in a fork of the process that it was made in."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from forks import in_a_fork
from ostinato.engine import Engine, SamplingParams
from ostinato.graphs import ForkedError
from tiny import byte_tokenizer, tiny_llama

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def make(device: torch.device) -> Engine:
    torch.manual_seed(0)
    engine = Engine(tiny_llama(device, "int8"), byte_tokenizer(), max_batch=4, page_size=4)
    engine.capture(progress=False)
    return engine


def test_a_forked_engine_is_refused_and_the_parent_goes_on(device: torch.device) -> None:
    engine = make(device)
    expected = engine.generate(["one"], GREEDY)[0].token_ids
    request = engine.submit("one", GREEDY)
    while not engine.stats.decode_tokens > 6:  # on a GPU a token is on its way now
        engine.step()
    with engine.stream(["two"], GREEDY) as stream:
        next(stream)
        calls: list[Callable[[], object]] = [
            engine.capture,
            engine.step,
            lambda: engine.submit("x", GREEDY),
            lambda: engine.generate(["x"], GREEDY),
            lambda: engine.stream(["x"], GREEDY),
            lambda: list(stream),
        ]
        for call in calls:
            assert in_a_fork(call) == "ForkedError"
        for _ in stream:
            pass
    while not engine.idle:
        engine.step()
    assert engine.result(request).token_ids == expected


def test_what_needs_no_device_works_in_a_fork(device: torch.device) -> None:
    engine = make(device)
    done, cancelled = (engine.submit(text, GREEDY) for text in ("one", "two"))
    stream = engine.stream(["three"], GREEDY)
    next(stream)
    while engine.stats.decode_tokens < 3:
        engine.step()

    def child() -> None:
        stream.close()
        engine.cancel(cancelled)
        engine.result(cancelled)
        assert not engine.idle
        engine.close()
        engine.close()

    assert in_a_fork(child) == "nothing"
    stream.close()
    while not engine.idle:
        engine.step()
    assert len(engine.result(done).token_ids) == len(engine.result(cancelled).token_ids) == 6


def test_a_forked_child_may_make_an_engine_of_its_own() -> None:
    engine = make(torch.device("cpu"))
    expected = engine.generate(["one"], GREEDY)[0].token_ids

    def child() -> None:
        engine = make(torch.device("cpu"))
        assert engine.generate(["one"], GREEDY)[0].token_ids == expected

    assert in_a_fork(child) == "nothing"


def test_the_refusal_of_a_fork_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(torch.device("cpu"))
    monkeypatch.setattr(engine._process, "is_fork", True)
    with pytest.raises(ForkedError, match=f"the engine was made in process {os.getpid()}, and thi"):
        engine.step()
