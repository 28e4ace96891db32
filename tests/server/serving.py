"""Servers of a tiny model in a thread of the test's process, and a client of bare sockets."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvicorn

from ostinato.engine import Engine
from ostinato.server import EngineThread, Service, Settings, bind, serve
from tiny import byte_tokenizer, tiny_llama

T = TypeVar("T")
TOKENIZER = byte_tokenizer()
MODEL = "tiny"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_HEAD = {"content-type": "application/json"}


def make_engine(**options: Any) -> Engine:
    """Return a captured engine of a random model with a token per byte and 128 of context."""
    model = options.pop("model", None) or tiny_llama()
    defaults: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_chunk": 8}
    engine = Engine(model, TOKENIZER, **{**defaults, **options})
    engine.capture(progress=False, verify=False)
    return engine


@dataclass
class Client:
    """Sends requests to a server, each over a connection of its own."""

    port: int
    service: Service
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Send a request, a body that is not bytes as JSON, and return the open answer."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = self.connect()
        connection.request(method, path, body, {**JSON_HEAD, **self.headers, **(headers or {})})
        return connection.getresponse()

    def get(self, path: str) -> tuple[int, Any]:
        return _read(self.send("GET", path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        return _read(self.send("POST", path, body))

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Return the answer of a completion that succeeds."""
        status, document = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, document
        return document  # type: ignore[no-any-return]

    def refused(
        self, body: Any, path: str = "/v1/completions", status: int = 400
    ) -> dict[str, Any]:
        """Return the error of a request that is refused."""
        got, document = self.post(path, body)
        assert got == status, (got, document)
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        return document["error"]  # type: ignore[no-any-return]

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream, which must end with [DONE]."""
        answer = self.send("POST", path, {**body, "stream": True})
        assert answer.status == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, end = list(sse(answer))
        assert end == "[DONE]"
        return [json.loads(event) for event in events]

    def ask(self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine, between two steps of it."""
        assert isinstance(self.service.engine, EngineThread)
        return self.service.engine.call(function).result(20)

    def wait_idle(self, seconds: float = 20) -> None:
        """Wait until no text is admitted and the engine holds no page."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            free = self.ask(
                lambda e: e.idle and e.cache.free_pages == e.cache.usable_pages and not e._requests
            )
            if free and self.service.admission.taken == 0:
                return
            time.sleep(0.01)
        raise AssertionError("a request was not released")


def sse(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of each event as it comes."""
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()


def make_service(make: Callable[[], Engine] = make_engine, **options: Any) -> Service:
    """Return a service of an engine, in its thread."""
    thread = EngineThread(make)
    engine = thread.start()
    settings = options.pop("settings", None) or Settings(port=0)
    return Service(
        thread,
        TOKENIZER,
        (MODEL,),
        max_context=engine.max_context,
        max_batch=4,
        settings=settings,
        **options,
    )


@contextmanager
def serving(service: Service) -> Iterator[Client]:
    """Serve until the block ends, and check that the server ends then."""
    bound = bind("127.0.0.1", 0)
    servers: list[uvicorn.Server] = []
    thread = threading.Thread(target=lambda: serve(service, bound, on_ready=servers.append))
    thread.start()
    while not (servers and servers[0].started):
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield Client(bound.getsockname()[1], service)
    finally:
        servers[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def _read(answer: http.client.HTTPResponse) -> tuple[int, Any]:
    text = answer.read()
    kind = answer.headers["content-type"] or ""
    return answer.status, json.loads(text) if kind.startswith("application/json") else text.decode()
