"""What takes a server long: templates that loop, schemas that explode, and clients that leave."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ostinato.server.chat.render import ChatTemplate
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
