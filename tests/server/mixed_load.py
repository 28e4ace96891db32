"""Mixed load on a server process: random requests, whose texts are known, from many clients."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.engine import Engine
from random_requests import params_of, processed_fields, random_fields
from server_process import KEY, TINY_LLAMA, http_process, serve_process
from serving import JSON_HEAD, sse

CLIENTS = 16
FLAGS = ["--max-num-seqs", "16", "--max-model-len", "160", "--num-pages", "120"]
PATH = "/v1/completions"
COMMON = "The import statement combines two operations; it searches for the named module, then it "
WHOLE, STREAM, LEAVE, WRONG = "whole", "stream", "leave", "wrong"
WRONGS = [b"", b"{", b'{"prompt": 1}', b'{"prompt": "a", "frob": 1}', b'{"prompt": "\xff"}']
Body = dict[str, Any]


def random_bodies(draw: random.Random, count: int) -> Iterator[Body]:
    for number in range(count):
        # Many begin alike, so that prefixes are shared, kept and evicted.
        prompt = COMMON[: draw.choice([0, 0, 33, 90])] + f"{number} " + "abc " * draw.randrange(8)
        fields = random_fields(draw, most_tokens=8)
        yield {"prompt": prompt, **fields, **(processed_fields(draw) if number % 5 == 0 else {})}


def expected_texts(bodies: list[Body]) -> list[tuple[str, str]]:
    """Return the text of each request and why it ends, by an engine in this process."""
    model = load_model(TINY_LLAMA, device=torch.device("cpu"), max_context=160)
    options = {"max_batch": 16, "max_context": 160, "logits_processing": True}
    engine = Engine(model, load_tokenizer(TINY_LLAMA), **options)
    engine.capture([16], progress=False, verify=False)
    asked = [{k: v for k, v in body.items() if k != "prompt"} for body in bodies]
    found = engine.generate([body["prompt"] for body in bodies], [params_of(a) for a in asked])
    engine.close()
    assert all(completion.finish_reason is not None for completion in found)
    return [(c.text, c.finish_reason.value) for c in found if c.finish_reason is not None]


class Load:
    """Sends requests to the server at a port, and again where a restart has ended one.

    Args:
        port: of the server.
        bodies: of the requests.
        expected: text and finish reason of each.
    """

    def __init__(self, port: int, bodies: list[Body], expected: list[tuple[str, str]]) -> None:
        self._port = port
        self._bodies = bodies
        self._expected = expected
        self.up = threading.Event()  # a server takes requests
        self._begun = 0  # servers that were
        self.killed = False  # it was not given time to end what it had begun
        self.broken = 0  # answers that had begun and did not end

    def begin(self) -> None:
        """Note that a server takes requests."""
        self.killed = False
        self._begun += 1
        self.up.set()

    def end(self, *, killed: bool) -> None:
        """Note that it will be ended."""
        self.killed = killed
        self.up.clear()

    def send(self, number: int) -> None:
        """Send one request, and check its answer."""
        draw = random.Random(number)
        at = draw.randrange(len(self._bodies))
        kind = draw.choices([WHOLE, STREAM, LEAVE, WRONG], [8, 8, 3, 1])[0]
        deadline = time.monotonic() + 60
        while not self._sent(at, kind, draw):
            assert time.monotonic() < deadline, "no answer for a minute"
            self.up.wait(60)

    def _sent(self, at: int, kind: str, draw: random.Random) -> bool:
        """Return whether there was an answer; none is allowed while a server restarts."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        server, begun = self._server(), False
        try:
            body: Any = {**self._bodies[at], "stream": kind == STREAM or draw.random() < 0.5}
            if kind == WHOLE:
                body["stream"] = False
            data = draw.choice(WRONGS) if kind == WRONG else json.dumps(body).encode()
            head = {**JSON_HEAD, "authorization": f"Bearer {KEY}"}
            connection.request("POST", PATH, data, head)
            if kind == LEAVE and draw.random() < 0.3:
                return True
            answer = connection.getresponse()
            if answer.status == 503:  # it drains
                self._assert_ended(server)
                return False
            begun = True
            if kind == WRONG:
                assert answer.status == 400, answer.read()
            elif kind == LEAVE:
                answer.read(draw.randrange(200))
            else:
                assert answer.status == 200, (answer.read(), self._bodies[at])
                found = _streamed(answer) if kind == STREAM else _whole(answer)
                assert found == self._expected[at], self._bodies[at]
            return True
        except (OSError, http.client.HTTPException, EOFError):
            self.broken += begun and kind != LEAVE and not self.killed
            self._assert_ended(server)
            time.sleep(0.05)
            return False
        finally:
            connection.close()

    def _server(self) -> int:
        """Return the number of the server that takes requests now, 0 where none does."""
        return self._begun if self.up.is_set() else 0

    def _assert_ended(self, server: int) -> None:
        assert server == 0 or self._server() != server, "a request has failed without a restart"


def _whole(answer: http.client.HTTPResponse) -> tuple[str, str]:
    (choice,) = json.loads(answer.read())["choices"]
    return choice["text"], choice["finish_reason"]


def _streamed(answer: http.client.HTTPResponse) -> tuple[str, str]:
    *events, end = [*sse(answer)] or [""]
    if end != "[DONE]":
        raise EOFError
    documents = [json.loads(event) for event in events]
    if "error" in documents[-1]:
        assert documents[-1]["error"]["code"] == "engine_lost"
        raise EOFError
    choices = [document["choices"][0] for document in documents]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def metrics(port: int) -> dict[str, float]:
    """Return the server's metrics without labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics", headers={"authorization": f"Bearer {KEY}"})
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    pairs = [line.split() for line in lines if line[0] != "#" and "{" not in line]
    return {name: float(value) for name, value in pairs}


def assert_idle(port: int) -> None:
    """Check that the server holds no request and no page."""
    deadline = time.monotonic() + 20
    while True:
        numbers = metrics(port)
        pages = numbers["ostinato_engine_kv_pages"], numbers["ostinato_engine_kv_pages_free"]
        if numbers["ostinato_choices_admitted"] == 0 and pages[0] == pages[1]:
            return
        assert time.monotonic() < deadline, numbers
        time.sleep(0.1)


def held(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Return the bytes of memory and the files that a server holds, with its HTTP process."""
    memory = files = 0
    for proc in (Path("/proc") / str(process.pid), Path("/proc") / str(http_process(process.pid))):
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        memory += int(fields["VmRSS"].split()[0]) << 10
        files += len(list((proc / "fd").iterdir()))
    return memory, files


@contextmanager
def served(port: int, load: Load) -> Iterator[subprocess.Popen[bytes]]:
    with serve_process(port, *FLAGS) as process:
        assert process.stderr is not None
        # Its log is long: read, lest the pipe fills.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        load.begin()
        yield process
