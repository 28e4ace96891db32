"""Serve a model with several replicas on Ray Serve: one address, and an engine for each replica.

    pip install 'ostinato[ray]'
    python examples/ray_serve.py examples/tiny-llama --replicas 2 --port 8000

A router takes requests of OpenAI's API and hands each to the replica with the fewest. When a
replica dies, its requests begin again on another one. A text is a function of its prompt, its
parameters and its seed, so a stream goes on behind the last event that the client has got.
docs/how-to/scale-out.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Gauge
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ostinato.server import Settings, create_app
from ostinato.server.errors import error_body
from ostinato.server.loading import EngineOptions, ServedModel, load_service
from ostinato.server.metrics import EngineNumbers

PATIENCE = 60.0  # seconds in which a request finds another replica
PAUSE = 0.2  # seconds before it looks for one again
PASSED = ("authorization", "content-type", "x-request-id")  # headers that a replica gets
TOLD = (b"content-type", b"retry-after", b"x-request-id")  # headers of its answer
GAUGES = ("requests_waiting", "kv_pages", "kv_pages_free")

Headers = list[tuple[str, str]]


@serve.deployment(max_ongoing_requests=256, health_check_period_s=2, graceful_shutdown_timeout_s=60)
class Replica:
    """One engine, captured before Ray hands it requests.

    Ray drains it before it stops it: it gets no new requests, and has `graceful_shutdown_timeout_s`
    to end those that it has.

    Args:
        model: folder of a checkpoint.
        name: that requests give as `model`.
        max_batch: texts that grow at once.
    """

    def __init__(self, model: str, name: str, max_batch: int) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        options = EngineOptions(device=device, max_batch=max_batch, progress=False)
        keys = tuple(filter(None, [os.environ.get("OSTINATO_API_KEY")]))
        self._service = load_service(
            ServedModel(Path(model), (name,)), options, Settings(api_keys=keys)
        )
        self._app = create_app(self._service)
        self._gauges = {each: Gauge(f"ostinato_engine_{each}") for each in GAUGES}

    async def answer(
        self, method: str, path: str, headers: Headers, body: bytes
    ) -> AsyncGenerator[tuple[int, Headers] | bytes, None]:
        """Yield the status and the headers of the answer, and then its body piece by piece."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        request = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Any:
            if request:
                return request.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(_scope(method, path, headers, len(body)), receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    told = [(k.decode(), v.decode()) for k, v in message["headers"] if k in TOLD]
                    yield message["status"], told
                elif message.get("body"):
                    yield message["body"]
        finally:
            left.set()  # where the client has left, its texts are cancelled
            await asyncio.gather(task, return_exceptions=True)

    async def check_health(self) -> None:
        """Let Ray replace a replica whose engine has failed, and export its gauges."""
        if not self._service.engine.alive:
            raise RuntimeError("the engine has failed")
        numbers = await asyncio.wrap_future(self._service.engine.call(EngineNumbers.of))
        for name, gauge in self._gauges.items():
            gauge.set(numbers.values[name])

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()


@serve.deployment(
    max_ongoing_requests=4096, graceful_shutdown_timeout_s=60, ray_actor_options={"num_cpus": 0}
)
class Router:
    """Takes requests, and sees to it that each gets an answer.

    Args:
        replicas: that may answer.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        path = request.url.path
        if path == "/metrics":  # of one replica, they would look like those of all
            return JSONResponse(error_body(404, "/metrics: Ray exports those of replicas"), 404)
        headers = [(name, request.headers[name]) for name in PASSED if name in request.headers]
        body = await request.body()
        if path.endswith("completions"):
            body = with_seed(body)
        pieces = self._pieces((request.method, path, headers, body))
        head = await anext(pieces)
        assert isinstance(head, tuple)
        status, told = head[0], dict(head[1])
        if told.get("content-type", "").startswith("text/event-stream"):
            return StreamingResponse(pieces, status, told)
        return Response(b"".join([piece async for piece in pieces]), status, told)

    async def _pieces(self, asked: Sequence[Any]) -> AsyncGenerator[Any, None]:
        """Yield the head and the body of an answer, from as many replicas as it takes."""
        progress = Progress()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self._replicas.answer.remote(*asked)
            try:
                async for item in answer:
                    if isinstance(item, tuple) and progress.begun and item[0] != 200:
                        break  # this one is full, or stops
                    if (piece := progress.new(item)) is not None:
                        yield piece
                else:
                    return
            except RayActorError:  # the replica is lost
                progress.lose()
            finally:
                answer.cancel()
            await asyncio.sleep(PAUSE)
        error = error_body(503, "no replica has answered in time", None, "no_replica")
        if progress.begun:
            yield b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"
        else:
            yield 503, [("content-type", "application/json"), ("retry-after", "5")]
            yield json.dumps(error).encode()


class Progress:
    """How much of an answer its client has: the head, and pieces counted by their choice."""

    def __init__(self) -> None:
        self.begun = False
        self._name: dict[str, Any] = {}  # id and time, which the whole stream shares
        self._sent: Counter[int] = Counter()
        self._seen: Counter[int] = Counter()

    def lose(self) -> None:
        """Note that another replica begins again."""
        self._seen.clear()

    def new(self, item: tuple[int, Headers] | bytes) -> tuple[int, Headers] | bytes | None:
        """Return what the client lacks of an item; None where it has it."""
        if isinstance(item, tuple):
            begun, self.begun = self.begun, True
            return None if begun else item
        event = json.loads(item[6:]) if item.startswith(b"data: {") else {}
        choice = event["choices"][0]["index"] if event.get("choices") else -1
        self._seen[choice] += 1
        if self._seen[choice] <= self._sent[choice]:
            return None
        self._sent[choice] += 1
        if "id" not in event:
            return item
        self._name = self._name or {name: event[name] for name in ("id", "created")}
        return b"data: " + json.dumps({**event, **self._name}).encode() + b"\n\n"


def with_seed(body: bytes) -> bytes:
    """Return a request's body with a seed, so that its text is the same on every replica."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body  # a replica says what is wrong with it
    if isinstance(document, dict) and document.get("seed") is None:
        document["seed"] = secrets.randbits(62)
    return json.dumps(document).encode()


def _scope(method: str, path: str, headers: Headers, length: int) -> dict[str, Any]:
    own = [(name.encode(), value.encode()) for name, value in headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*own, (b"content-length", str(length).encode())],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--name", help="that requests give as model (default: the folder's)")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    # RAY_ADDRESS names a Ray that runs; else one is started here, and ends with this program.
    own = "RAY_ADDRESS" not in os.environ
    context = ray.init(**({"include_dashboard": False} if own else {}))
    print(f"RAY_ADDRESS={context.address_info['gcs_address']}", flush=True)
    serve.start(http_options={"host": args.host, "port": args.port})
    folder = args.model.resolve()
    needs = {"num_gpus": 1} if torch.cuda.is_available() else {"num_cpus": 1}
    replicas = Replica.options(num_replicas=args.replicas, ray_actor_options=needs)
    bound = replicas.bind(str(folder), args.name or folder.name, args.max_batch)
    serve.run(Router.bind(bound), blocking=own)


if __name__ == "__main__":
    main()
