"""What clients are told when the engine is ahead of the server, and that the server keeps up."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ostinato.engine import FinishReason, TokenEvent
from ostinato.server.chat.render import ChatTemplate
from ostinato.server.engine_thread import EngineThread
from ostinato.server.jobs import Accepted, Job, Progress
from ostinato.server.service import Service
from ostinato.server.settings import Settings
from serving import CHATML, MODEL, TOKENIZER, Client, make_service, serving


class _AtOnce(EngineThread):
    """Has done all steps of a job before the server hears of the first."""

    def __init__(self) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type,return-value]

    @property
    def alive(self) -> bool:
        return True

    def submit(self, job: Job) -> None:
        texts, last = ["a", "b", "", "c"], FinishReason.LENGTH
        told = [
            Progress(choice, TokenEvent(choice, at, text, last if at == len(texts) - 1 else None))
            for at, text in enumerate(texts)
            for choice in range(len(job.prompts))
        ]
        job.deliver([Accepted(), *told])

    def stop(self) -> None:
        pass


@pytest.fixture(scope="module")
def ahead() -> Iterator[Client]:
    template = ChatTemplate({"default": CHATML}, {}, 5.0)
    service = Service(
        *(_AtOnce(), TOKENIZER, (MODEL,)),
        max_context=128,
        max_batch=4,
        settings=Settings(port=0),
        template=template,
    )
    with serving(service) as client:
        yield client


def test_steps_that_wait_are_one_event_of_a_choice(ahead: Client) -> None:
    body = {"prompt": "x", "n": 2, "max_tokens": 4, "stream_options": {"include_usage": True}}
    *events, end = ahead.events("/v1/completions", body)
    choices = [event["choices"][0] for event in events]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [
        (0, "abc", "length"),
        (1, "abc", "length"),
    ]
    assert end["usage"]["completion_tokens"] == 8


def test_steps_that_wait_are_one_event_of_a_chat(ahead: Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    choices = [event["choices"][0] for event in ahead.events("/v1/chat/completions", body)]
    assert [(c["delta"], c["finish_reason"]) for c in choices] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "abc"}, None),
        ({}, "length"),
    ]


def test_server_spares_the_collector_while_it_serves() -> None:
    gc.unfreeze()
    try:
        with serving(make_service()) as client:
            assert client.complete("abc", max_tokens=2)
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        gc.freeze()  # as conftest.py has it
