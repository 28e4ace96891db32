"""Full queues, deadlines, errors of the engine, and the end of a server."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPResponse
from typing import Any

import pytest
import torch

from ostinato.engine import Engine, SamplingParams
from ostinato.server import EngineThread, Settings
from ostinato.server.api import events
from ostinato.server.generation import Generation
from serving import TOKENIZER, Client, make_engine, make_service, serving, sse
from tiny import tiny_llama

PATH = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "xyz", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


def _slow_engine(seconds: float = 0.01) -> Engine:
    """Return an engine whose steps take at least so long."""
    engine = make_engine()
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    return engine


def _first_event(client: Client, body: dict[str, Any]) -> HTTPResponse:
    """Start a stream and return its answer, once its first event has come."""
    answer = client.send("POST", PATH, {**body, "stream": True})
    next(sse(answer))
    return answer


def _rest(answer: HTTPResponse) -> tuple[str, str]:
    """Return what is left of a stream: its text, and why it ended."""
    *chunks, end = sse(answer)
    assert end == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def test_full_queue_answers_429_and_recovers() -> None:
    service = make_service(_slow_engine, settings=Settings(port=0, max_queue=2))
    with serving(service) as client:
        answers = [_first_event(client, LONG) for _ in range(4)]
        waiting = [client.send("POST", PATH, {**LONG, "stream": True}) for _ in range(2)]
        refused = client.send("POST", PATH, SHORT)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert b"queue_full" in refused.read()
        # Never served, so it is no matter of time.
        assert client.refused({**SHORT, "n": 7})["param"] == "n"
        for answer in (*answers, *waiting):
            answer.close()
        client.wait_idle()
        client.complete(**SHORT)


def test_thousand_connections_are_served() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    service = make_service()
    with serving(service) as client, ExitStack() as stack:
        address = ("127.0.0.1", client.port)
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(1000)]
        client.complete(**SHORT)
        for connection in idle[::2]:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answers = [connection.recv(4096) for connection in idle[::2]]
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        client.complete(**SHORT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_texts_beyond_the_cache_are_refused() -> None:
    with serving(make_service(lambda: make_engine(num_pages=9))) as client:
        # 8 pages of 4 tokens; many texts take turns, one that is too long never fits.
        assert client.refused(LONG)["code"] == "context_length_exceeded"
        answer = client.complete("abc", n=16, max_tokens=16, ignore_eos=True, seed=1)
        assert answer["usage"]["completion_tokens"] == 16 * 16
        client.wait_idle()


def test_deadline_ends_a_request_with_an_error() -> None:
    # LONG takes three times the limit, SHORT a fifth of it: other processes may be at work, too.
    engine = partial(_slow_engine, 0.1)
    service = make_service(engine, settings=Settings(port=0, request_timeout=2))
    with serving(service) as client:
        assert client.refused(LONG, status=504)["code"] == "timeout"
        *_, error, end = sse(client.send("POST", PATH, {**LONG, "stream": True}))
        assert "timeout" in error
        assert end == "[DONE]"
        client.wait_idle()
        client.complete(**SHORT)


def test_client_that_does_not_read_is_cut_off(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_GRACE", 0.1)

    async def stuck(message: Any) -> None:
        await asyncio.sleep(60)

    async def silent() -> Any:
        await asyncio.sleep(60)

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {}

    async def answer() -> None:
        service = client.service
        deadline = asyncio.get_running_loop().time() + 0.2
        generation = Generation(
            service.engine, service.admission, service.metrics, [[1]], [SamplingParams()], deadline
        )
        await generation.start()
        assert service.admission.taken == 1
        await events.EventStream(generation, chunks())({}, silent, stuck)

    with pytest.raises(ConnectionAbortedError):
        asyncio.run(answer())
    client.wait_idle()


def test_logits_that_are_nan_end_their_request_alone() -> None:
    model = tiny_llama()
    model.embedding[7] = torch.nan  # token 7 is of no other prompt
    with serving(make_service(lambda: make_engine(model=model))) as client:
        expected = client.complete(**LONG)
        with ThreadPoolExecutor(4) as pool:
            good = [pool.submit(client.complete, **LONG) for _ in range(3)]
            error = client.refused({**SHORT, "prompt": [7, 8]}, status=500)
            texts = [future.result()["choices"] for future in good]
        assert error["code"] == "engine_error"
        assert texts == [expected["choices"]] * 3
        *_, last, end = sse(client.send("POST", PATH, {**SHORT, "prompt": [7], "stream": True}))
        assert "engine_error" in last
        assert end == "[DONE]"
        client.wait_idle()


def _engine_failing(fails: Callable[[Engine], bool]) -> Engine:
    """Return an engine whose steps fail while `fails` says so."""
    engine = make_engine()
    step = engine.step

    def maybe() -> Any:
        if fails(engine):
            raise RuntimeError("/secret/path: a step fails")
        return step()

    engine.step = maybe  # type: ignore[method-assign]
    return engine


def test_steps_that_fail_for_a_while_harm_nobody() -> None:
    left = [False] * 5 + [True] * 2 + [False] * 3 + [True] * 2
    with serving(make_service(lambda: _engine_failing(lambda _: bool(left and left.pop(0))))) as it:
        failed = it.complete(**LONG)["choices"]
        assert not left
        assert it.complete(**LONG)["choices"] == failed


def test_request_that_breaks_steps_is_ended_alone() -> None:
    (bad,) = TOKENIZER.encode("X").ids

    def breaks(engine: Engine) -> bool:
        return any(request.prompt[0] == bad for request in engine._requests.values())

    with serving(make_service(lambda: _engine_failing(breaks))) as client:
        (expected,) = client.complete(**LONG)["choices"]
        good = _first_event(client, LONG)
        told = list(sse(client.send("POST", PATH, {**SHORT, "prompt": "X", "stream": True})))
        assert "engine_error" in told[-2]
        assert "secret" not in "".join(told)
        text, reason = _rest(good)
        assert expected["text"].endswith(text)
        assert reason == "length"
        client.wait_idle()


def test_lost_device_ends_the_server_and_says_so() -> None:
    engine = make_engine()

    def lost() -> Any:
        raise torch.AcceleratorError("the device is lost")

    engine.step = lost  # type: ignore[method-assign]
    service = make_service(lambda: engine)
    with serving(service) as client:
        assert client.refused(LONG, status=500)["code"] == "engine_error"
        assert not service.engine.alive
    with pytest.raises(Exception, match="has stopped"):
        client.ask(lambda engine: engine.idle)


def test_error_of_making_an_engine_is_raised() -> None:
    def broken() -> Engine:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        EngineThread(broken).start()


def test_drain_lets_running_requests_end() -> None:
    (expected,) = make_engine().generate(
        ["abc"], SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    )
    with ThreadPoolExecutor(1) as pool:
        with serving(make_service(_slow_engine)) as client:
            rest = pool.submit(_rest, _first_event(client, LONG))
        text, reason = rest.result(10)
    assert len(text) > len(expected.text) / 2
    assert expected.text.endswith(text)
    assert reason == "length"


def test_drain_ends_what_takes_too_long() -> None:
    service = make_service(lambda: _slow_engine(0.1), settings=Settings(port=0, drain_timeout=0.2))
    with serving(service) as client:
        running = _first_event(client, LONG)
    *_, error, end = sse(running)
    assert "server_stopping" in error
    assert end == "[DONE]"


def test_draining_server_is_not_ready(client: Client) -> None:
    client.service.admission.draining = True
    try:
        assert client.get("/ready")[0] == 503
        assert client.get("/health")[0] == 200
        answer = client.send("POST", PATH, SHORT)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        answer.read()
    finally:
        client.service.admission.draining = False
