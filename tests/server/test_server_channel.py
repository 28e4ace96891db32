"""An engine's thread behind a channel: what a client of it is told, and when an end goes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ostinato.engine import Engine, FinishReason, SamplingParams, StructuredOutput, TokenEvent
from ostinato.engine.logprobs import TokenLogprobs
from ostinato.graphs import RankError
from ostinato.server import EngineThread, Service, Settings
from ostinato.server.channel import Channel, packed, portable, unpacked
from ostinato.server.engine_client import EngineClient
from ostinato.server.engine_host import EngineHost
from ostinato.server.errors import ApiError, EngineError, EngineLostError
from ostinato.server.jobs import Accepted, Ended, Job, Message, OnLoop, Progress
from serving import MODEL, TOKENIZER, make_engine

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@dataclass
class Linked:
    """A client, and the thread at the other end of its channel."""

    client: EngineClient
    thread: EngineThread
    far_end: Channel


@contextmanager
def linked(make: Callable[[], Engine] = make_engine) -> Iterator[Linked]:
    near, far = map(Channel, socket.socketpair())
    thread = EngineThread(make)
    thread.start()
    hosting = threading.Thread(target=EngineHost(thread, far).run)
    hosting.start()
    client = EngineClient(near)
    try:
        yield Linked(client, thread, far)
    finally:
        client.stop()
        hosting.join(10)
        assert not hosting.is_alive()
        thread.stop()


def told(client: EngineClient, prompts: list[list[int]], params: SamplingParams) -> list[Message]:
    """Return all messages of a job."""

    async def submit() -> list[Message]:
        messages: list[Message] = []
        ended = asyncio.Event()

        def deliver(its: list[Message]) -> None:
            messages.extend(its)
            last = [m for m in messages if isinstance(m, Progress) and m.event.finish_reason]
            if len(last) == len(prompts) or any(isinstance(m, Ended) for m in its):
                ended.set()

        receiver = OnLoop(asyncio.get_running_loop())
        client.submit(Job(prompts, [params] * len(prompts), receiver, deliver))
        await asyncio.wait_for(ended.wait(), 20)
        return messages

    return asyncio.run(submit())


def test_texts_are_those_of_the_engine() -> None:
    prompts = [[5, 6, 7], [8, 9]]
    expected = make_engine().generate(prompts, GREEDY)
    with linked() as link:
        first, *events = told(link.client, prompts, GREEDY)
        assert first == Accepted()
        for choice, completion in enumerate(expected):
            its = [e for e in events if isinstance(e, Progress) and e.choice == choice]
            assert "".join(e.event.text for e in its) == completion.text
            assert [e.event.token_id for e in its] == list(completion.token_ids)
            assert its[-1].completion is not None
            assert its[-1].completion.text == completion.text
            assert all(e.completion is None for e in its[:-1])


def test_refused_prompt_has_the_errors_type_and_text() -> None:
    with linked() as link:
        (ended,) = told(link.client, [[1] * 1000], GREEDY)
        assert isinstance(ended, Ended)
        assert type(ended.error) is ValueError
        assert "max_context" in str(ended.error)


def test_cancelled_job_gives_its_pages_back() -> None:
    with linked() as link:
        job = Job([[5, 6]], [SamplingParams(max_tokens=100, ignore_eos=True)], _Ignored(), _never)
        link.client.submit(job)
        link.client.cancel(job)
        link.client.cancel(job)  # again does nothing
        numbers = link.client.numbers().result(10)
        assert numbers.values["kv_pages_free"] == numbers.values["kv_pages"]
        assert link.thread.call(lambda engine: engine.idle).result(10)


def test_forms_are_compiled_at_the_other_end() -> None:
    pytest.importorskip("xgrammar")
    with linked(lambda: make_engine(logits_processing=True)) as link:
        link.client.compile_grammar(StructuredOutput(regex="[ab]+")).result(60)
        with pytest.raises(ValueError, match="regex: got a text that is no grammar"):
            link.client.compile_grammar(StructuredOutput(regex="[ab")).result(60)


def test_a_form_that_nobody_waits_for_is_forgotten() -> None:
    pytest.importorskip("xgrammar")
    with linked(lambda: make_engine(logits_processing=True)) as link:
        busy = link.thread._compiler.submit(time.sleep, 1)  # what is queued behind it has not begun
        future = link.client.compile_grammar(StructuredOutput(regex="[ab]+"))
        assert future.cancel()
        busy.result(10)
        other = StructuredOutput(regex="[cd]+")
        link.client.compile_grammar(other).result(60)
        grammars = link.thread._made.result().grammars
        assert grammars is not None
        assert grammars.keeps(other)
        assert not grammars.keeps(StructuredOutput(regex="[ab]+"))


def test_client_is_told_that_a_rank_is_lost() -> None:
    with linked() as link:
        died = threading.Event()
        link.client.on_death = died.set
        running: list[Message] = []
        job = Job([[5]], [SamplingParams(max_tokens=100)], _Kept(running), _never)
        link.client.submit(job)
        link.thread.abandon(RankError("rank 1 is lost"))
        assert died.wait(10)
        assert not link.client.alive
        assert isinstance(running[-1], Ended)
        assert isinstance(running[-1].error, EngineLostError)
        (ended,) = told(link.client, [[5]], GREEDY)
        assert isinstance(ended, Ended)
        assert isinstance(ended.error, EngineLostError)
        with pytest.raises(EngineLostError):
            link.client.numbers().result(10)


def test_client_is_told_of_a_death_before_it_came() -> None:
    engine = make_engine()

    def lost() -> Any:
        raise torch.AcceleratorError("the device is lost")

    engine.step = lost  # type: ignore[method-assign]
    thread = EngineThread(lambda: engine)
    thread.start()
    thread.submit(Job([[5]], [GREEDY], _Ignored(), _never))
    thread._thread.join(10)
    near, far = map(Channel, socket.socketpair())
    threading.Thread(target=EngineHost(thread, far).run).start()
    client = EngineClient(near)
    (ended,) = told(client, [[5]], GREEDY)
    assert isinstance(ended, Ended)
    assert type(ended.error) is EngineError
    client.stop()


def test_client_ends_all_jobs_when_the_other_end_goes() -> None:
    with linked() as link:
        died = threading.Event()
        link.client.on_death = died.set
        running: list[Message] = []
        link.client.submit(Job([[5]], [SamplingParams(max_tokens=100)], _Kept(running), _never))
        link.far_end.close()
        assert died.wait(10)
        assert isinstance(running[-1], Ended)
        assert isinstance(running[-1].error, EngineLostError)


@pytest.mark.parametrize("form", [None, StructuredOutput(regex="a")])
def test_requests_are_answered_when_the_other_end_has_gone(form: StructuredOutput | None) -> None:
    with linked() as link:
        service = Service(
            *(link.client, TOKENIZER, (MODEL,)), max_context=128, max_batch=4, settings=Settings()
        )
        link.far_end.close()
        with pytest.raises(ApiError) as raised:
            asyncio.run(service.generate([[5]], [SamplingParams(structured=form)]))
        assert (raised.value.status_code, raised.value.code) == (503, "engine_lost")
        assert service.admission.taken == 0


def test_host_ends_all_jobs_when_the_client_goes() -> None:
    with linked() as link:
        link.client.submit(
            Job([[5]], [SamplingParams(max_tokens=120, ignore_eos=True)], _Ignored(), _never)
        )
        link.client.stop()
        deadline = time.monotonic() + 10
        while not link.thread.call(lambda engine: engine.idle).result(10):
            assert time.monotonic() < deadline


def test_messages_survive_the_channel() -> None:
    logprobs = TokenLogprobs(-0.5, ((1, -0.5), (2, -1.0)))
    messages: list[Message] = [
        Accepted(),
        Progress(1, TokenEvent(3, 4, "a")),
        Progress(0, TokenEvent(3, 4, "a", logprobs=logprobs)),
        Progress(0, TokenEvent(3, None, "", FinishReason.ERROR, error="structured: no")),
    ]
    near, far = map(Channel, socket.socketpair())
    near.send("told", [packed(message) for message in messages])
    received = far.receive()
    assert received is not None
    assert [unpacked(message) for message in received[1]] == messages


@pytest.mark.parametrize("kind", [TypeError, ValueError, EngineError, EngineLostError])
def test_errors_keep_their_type(kind: type[Exception]) -> None:
    class Own(kind):  # type: ignore[misc,valid-type]
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one}: {two}")

    error = portable(Own("a", "b"))
    assert type(error) is kind
    assert str(error) == "a: b"


def test_channel_ends_in_the_middle_of_a_message() -> None:
    near, far = socket.socketpair()
    far.sendall((1 << 20).to_bytes(8, "little") + b"half")
    far.close()
    assert Channel(near).receive() is None


def test_sending_to_an_end_that_has_gone_raises_nothing() -> None:
    near, far = map(Channel, socket.socketpair())
    far.close()
    near.send("anything", b"x" * 1_000_000)
    assert near.receive() is None


class _Ignored:
    def take(self, told: list[tuple[Job, list[Message]]]) -> None:
        pass


class _Kept:
    def __init__(self, kept: list[Message]) -> None:
        self._kept = kept

    def take(self, told: list[tuple[Job, list[Message]]]) -> None:
        for _, messages in told:
            self._kept += messages


def _never(messages: list[Message]) -> None:
    raise AssertionError(messages)
