"""examples/ray_serve.py on a local Ray: a replica is killed under load, and all are answered."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.engine import Engine, SamplingParams
from server_process import TINY_LLAMA, free_port
from serving import JSON_HEAD, sse

pytestmark = pytest.mark.ray

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
REPLICAS = 2
PROMPTS = [f"{number}. The import statement" for number in range(40)]
FIELDS = {"max_tokens": 50, "temperature": 1.0, "ignore_eos": True}
PATH = "/v1/completions"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "token",  # as a Ray that is started here has it, for who joins it later, too
    "RAY_USAGE_STATS_ENABLED": "0",
    # On a busy machine 5 seconds are not enough, and processes of niceness 15 hardly start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True)
class Running:
    """The example: the port at which it serves, its process, and the file of its output."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Return the text of each prompt, with its number as seed."""
    model = load_model(TINY_LLAMA, device=torch.device("cpu"))
    engine = Engine(model, load_tokenizer(TINY_LLAMA), max_batch=8)
    engine.capture([8], progress=False, verify=False)
    params = [SamplingParams(**FIELDS, seed=number) for number in range(len(PROMPTS))]
    texts = [completion.text for completion in engine.generate(PROMPTS, params)]
    engine.close()
    return texts


def _command(replicas: int, port: int) -> list[str]:
    """Return the command that runs the example."""
    python = Path(os.environ["OSTINATO_RAY"]).absolute() / "python"
    command = [str(python), str(EXAMPLE), str(TINY_LLAMA), "--replicas", str(replicas)]
    return [*command, "--name", "tiny", "--max-batch", "8", "--port", str(port)]


@pytest.fixture(scope="module")
def ray_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run the example with two replicas."""
    port = free_port()
    log = tmp_path_factory.mktemp("ray") / "log"
    environment = {**os.environ, **ENVIRONMENT}
    with log.open("wb") as out:
        process = subprocess.Popen(
            _command(REPLICAS, port), env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + 240
            while _status(port, "/ready") != 200:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            yield Running(port, process, log)
        finally:
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                _, left = psutil.wait_procs(started, timeout=10)
                for each in left:
                    each.kill()


@contextmanager
def _answer(port: int, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, JSON_HEAD)
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def _status(port: int, path: str, body: Any = None) -> int:
    try:
        with _answer(port, "GET" if body is None else "POST", path, body) as answer:
            return answer.status
    except OSError:
        return 0


def _text(port: int, number: int) -> tuple[str, int]:
    """Return the text of a prompt, by a stream or not, and how many names its events have."""
    body = {"prompt": PROMPTS[number], **FIELDS, "seed": number, "stream": number % 4 != 0}
    with _answer(port, "POST", PATH, body) as answer:
        assert answer.status == 200, answer.read()
        if not body["stream"]:
            return json.loads(answer.read())["choices"][0]["text"], 1
        *events, end = sse(answer)
    assert end == "[DONE]"
    documents = [json.loads(event) for event in events]
    text = "".join(document["choices"][0]["text"] for document in documents)
    return text, len({document["id"] for document in documents})


def _replicas(process: subprocess.Popen[bytes]) -> set[int]:
    """Return the processes of replicas, among those that the example has started."""
    found = set()
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(each.cmdline())
            if "ServeReplica:default:Replica" in title or "default#Replica#" in title:
                found.add(each.pid)
    return found


def test_texts_are_those_of_one_engine(ray_serve: Running, expected: list[str]) -> None:
    port = ray_serve.port
    assert [_text(port, number) for number in range(4)] == [(text, 1) for text in expected[:4]]
    assert _status(port, "/health") == 200
    assert _status(port, "/metrics") == 404
    assert _status(port, PATH, {"prompt": "a", "frob": 1}) == 400
    assert _status(port, "/tokenize", {"prompt": "a"}) == 200
    # A request without a seed gets one.
    assert _status(port, PATH, {"prompt": "a", "max_tokens": 2}) == 200


def test_replica_killed_under_load_loses_no_request(
    ray_serve: Running, expected: list[str]
) -> None:
    port, process = ray_serve.port, ray_serve.process
    before = _replicas(process)
    assert len(before) == REPLICAS
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(_text, port, number) for number in range(len(PROMPTS))]
        while sum(future.done() for future in running) < 4:
            time.sleep(0.01)
        os.kill(min(before), signal.SIGKILL)
        answers = [future.result() for future in running]
    assert answers == [(text, 1) for text in expected]
    # Ray starts another one in its place.
    deadline = time.monotonic() + 120
    while len(now := _replicas(process)) < REPLICAS or min(before) in now:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_replicas_that_stop_end_their_requests(ray_serve: Running, expected: list[str]) -> None:
    """The example is run again with one replica on the same Ray: the others drain."""
    before = _replicas(ray_serve.process)
    (address,) = re.findall(r"^RAY_ADDRESS=(\S+)", ray_serve.log.read_text(), re.MULTILINE)
    environment = {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": address}
    again = subprocess.Popen(_command(1, ray_serve.port), env=environment)
    numbers = itertools.cycle(range(len(PROMPTS)))
    with ThreadPoolExecutor(6) as pool:
        while again.poll() is None or before & _replicas(ray_serve.process):
            assert not again.returncode
            some = [next(numbers) for _ in range(6)]
            answers = list(pool.map(lambda number: _text(ray_serve.port, number), some))
            assert answers == [(expected[number], 1) for number in some]
    assert again.returncode == 0
    assert len(_replicas(ray_serve.process)) == 1
