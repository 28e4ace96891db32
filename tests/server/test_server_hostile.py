"""What takes a server long: templates that loop, schemas that explode, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ostinato.server import Settings
from ostinato.server.chat.render import ChatTemplate
from ostinato.server.preparation import Preparation, kind_of
from serving import Client, make_engine, make_service, serving

PATH = "/v1/completions"
SHORT = {"prompt": "xyz", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
LOOPS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
TEMPLATE = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}ok"


def _refused_beside_others(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a request that takes long, and check that others are served meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.refused, body, path)
        served = 0
        while not slow.done():
            client.complete(**SHORT)
            served += 1
    assert served > 1
    return slow.result()


def test_chat_template_that_loops_holds_up_nobody() -> None:
    with serving(make_service(template=ChatTemplate({"default": TEMPLATE}, {}, 0.5))) as client:
        path = "/v1/chat/completions"
        say = [{"role": "user", "content": "hi"}]
        body = {"messages": say, "max_tokens": 2, "ignore_eos": True}
        assert client.post(path, body)[0] == 200
        error = _refused_beside_others(
            client, path, {"messages": [{"role": "user", "content": "loop"}]}
        )
        assert (error["param"], error["code"]) == ("messages", "template_error")
        assert client.post(path, body)[0] == 200
        client.wait_idle()


def test_schema_that_explodes_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar")
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(6):
        both = {"type": "object", "properties": {"a": nested, "b": nested}}
        nested = {"anyOf": [both, {"type": "array", "items": nested}]}
    engine = make_engine(logits_processing=True)
    assert engine.grammars is not None
    monkeypatch.setattr(engine.grammars, "_seconds", 0.5)
    service = make_service(lambda: engine)
    with serving(service) as client:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": nested}}
        error = _refused_beside_others(client, PATH, {"prompt": "a", "response_format": form})
        assert "longer than 0.5 s to compile" in error["message"]
        client.wait_idle()


def _slow_schema(number: int) -> dict[str, Any]:
    """Return a request whose form takes long to compile, another one for each number."""
    depth = 600 + number
    schema = '{"items":' * depth + '{"type":"array"}' + "}" * depth
    return {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}}


def test_many_slow_schemas_hold_up_nobody_else() -> None:
    pytest.importorskip("xgrammar")
    known = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[a-z]+"}}
    engine = make_engine(logits_processing=True)
    assert engine.grammars is not None
    engine.grammars._seconds = 3.0
    with serving(make_service(lambda: engine)) as client, ThreadPoolExecutor(12) as pool:
        client.complete(**known)
        slow = [pool.submit(client.post, PATH, _slow_schema(n)) for n in range(12)]
        time.sleep(0.3)
        for body in (SHORT, known):
            started = time.monotonic()
            client.complete(**body)
            assert time.monotonic() - started < 2.5  # less than one of them takes
        assert not all(request.done() for request in slow)
        client.service.preparation.end()
        assert {request.result()[0] for request in slow} <= {200, 400, 503}


def test_long_texts_and_templates_hold_up_no_short_texts() -> None:
    held = threading.Event()

    async def main() -> str:
        preparation = Preparation(30)
        kinds = [kind_of("a" * 2**20)] * 3 + ["template"] * 3
        slow = [asyncio.create_task(preparation.run(kind, held.wait)) for kind in kinds]
        await asyncio.sleep(0.1)
        told = await preparation.run(kind_of("a"), lambda: "told")
        assert not any(task.done() for task in slow)
        held.set()
        await asyncio.gather(*slow)
        preparation.close()
        return told

    assert asyncio.run(asyncio.wait_for(main(), 20)) == "told"


def test_time_limits_begin_before_the_form_is_compiled() -> None:
    pytest.importorskip("xgrammar")
    settings = Settings(port=0, request_timeout=0.5)
    service = make_service(lambda: make_engine(logits_processing=True), settings=settings)
    with serving(service) as client:
        error = client.refused(_slow_schema(0), PATH, status=504)
        assert error["code"] == "timeout"


def test_end_does_not_wait_for_compilations() -> None:
    pytest.importorskip("xgrammar")
    settings = Settings(port=0, drain_timeout=0.5)
    service = make_service(lambda: make_engine(logits_processing=True), settings=settings)
    with ThreadPoolExecutor(6) as pool:
        with serving(service) as client:
            slow = [pool.submit(client.post, PATH, _slow_schema(n)) for n in range(6)]
            time.sleep(1.0)
            started = time.monotonic()
        assert time.monotonic() - started < 8  # one takes several seconds, and they wait in line
        for request in slow:
            status, document = request.result()
            assert (status, document["error"]["code"]) == (503, "server_stopping")


def test_a_compiler_that_was_killed_is_started_again() -> None:
    pytest.importorskip("xgrammar")
    engine = make_engine(logits_processing=True)
    with serving(make_service(lambda: engine)) as client:
        for regex in ("[ab]+", "[cd]+"):
            client.complete("a", max_tokens=4, structured_outputs={"regex": regex})
            assert engine.grammars is not None
            worker = engine.grammars._worker
            assert worker is not None
            worker.kill()
            worker._process._process.wait()


@pytest.mark.parametrize("missing", [0, 1])
def test_clients_that_leave_while_they_wait_or_send(missing: int) -> None:
    """More texts than run at once: some are left in the queue, or before their body has come."""
    engine = make_engine()
    step = engine.step

    def slow() -> Any:
        time.sleep(0.05)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    expected = (0, 0) if missing else (12, 8)
    long = json.dumps({"prompt": "abc", "max_tokens": 100, "ignore_eos": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    data = f"{head}content-length: {len(long) + missing}\r\n\r\n".encode() + long
    with serving(make_service(lambda: engine)) as client:
        left = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(12)]
        for connection in left:
            connection.sendall(data)
        deadline = time.monotonic() + 10

        def taken_and_waiting() -> tuple[int, int]:
            waiting = client.ask(lambda engine: engine.waiting)
            return client.service.admission.taken, waiting

        while taken_and_waiting() != expected:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for connection in left:
            connection.close()
        client.wait_idle()
        client.complete(**SHORT)
