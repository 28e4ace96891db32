"""`ostinato serve` as a process: from its flags to its end by a signal."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import sys

import pytest
from page_blocks import code_blocks

from ostinato.cli.main import main
from ostinato.server import EngineThread, Settings, bind
from ostinato.server.http_process import HttpProcess
from ostinato.server.loading import ServedModel
from ostinato.server.process import serve
from server_process import KEY, TINY_LLAMA, free_port, http_process, serve_process
from serving import make_service

BODY = {"prompt": "Classes", "max_tokens": 60, "ignore_eos": True, "stream": True, "seed": 1}


def _stream(port: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data: ")
    return answer


def test_sigkill_then_a_clean_start_then_sigterm_under_load() -> None:
    port = free_port()
    flags = ["--served-model-name", "tiny", "--max-num-seqs", "4", "--max-model-len", "80"]
    flags += ["--cudagraph-capture-sizes", "4", "--gpu-memory-utilization", "0.5"]
    with serve_process(port, *flags) as process:
        answer = _stream(port)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        assert b"engine_lost" in answer.read()
    with serve_process(port, *flags) as process:
        answers = [_stream(port) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        texts = [answer.read() for answer in answers]
        assert all(text.endswith(b"data: [DONE]\n\n") for text in texts)
        assert all(b'"finish_reason":"length"' in text for text in texts)
        assert process.wait(20) == 0
        assert process.stderr is not None
        log = process.stderr.read().decode().splitlines()
    entries = [json.loads(line) for line in log if line.startswith("{")]
    requests = [e for e in entries if e["message"] == "request" and e["route"] != "/ready"]
    assert [e["completion_tokens"] for e in requests] == [60] * 3
    assert not any("Classes" in line for line in log)
    assert "captured on cpu" in "".join(log)


def test_server_ends_with_its_http_process() -> None:
    port = free_port()
    with serve_process(port, "--max-num-seqs", "2") as process:
        answer = _stream(port)
        os.kill(http_process(process.pid), signal.SIGKILL)
        assert process.wait(30) == 1
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert process.stderr is not None
        assert "has ended with exit code -9" in process.stderr.read().decode()


def test_http_process_ends_when_there_will_be_no_engine() -> None:
    bound = bind("127.0.0.1", 0)
    with HttpProcess(bound, ServedModel(TINY_LLAMA, ("tiny",)), Settings(port=0)) as http_side:
        process = http_side._process
    assert process.returncode == 0


def test_http_process_names_what_it_cannot_read() -> None:
    bound = bind("127.0.0.1", 0)
    model = ServedModel(TINY_LLAMA, ("tiny",), tools="x")
    with pytest.raises(ValueError, match="tool_call_parser: got 'x'"):
        HttpProcess(bound, model, Settings(port=0))


def test_the_load_of_the_page_fits_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [text for text in code_blocks("docs/server.md", "sh") if "bench serve" in text]
    port = free_port()
    command = block.replace("localhost:8000", f"127.0.0.1:{port}").replace("\\\n", " ")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve_process(port, "--served-model-name", "tiny"):
        assert main([*shlex.split(command)[1:], "--requests", "3"]) == 0


def test_server_listens_on_the_loopback_address_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[tuple[str, int]] = []

    class Http:
        def __init__(self, listener: socket.socket, *given: object) -> None:
            bound.append(listener.getsockname())
            listener.close()

        def __enter__(self) -> Http:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def serve(self, engine: EngineThread, limits: object) -> bool:
            engine.stop()
            return True

    monkeypatch.setattr("ostinato.server.http_process.HttpProcess", Http)
    flags = ["--device", "cpu", "--port", "0", "--max-batch", "1", "--max-context", "32"]
    assert main(["serve", str(TINY_LLAMA), *flags, "--no-verify"]) == 0
    assert [address for address, _ in bound] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "port: got 70000"),
        (["--max-queue", "-1"], "max_queue: got -1"),
        (["--max-batch", "0"], "max_batch: got 0"),
        (["--memory-fraction", "2"], "memory_fraction: got 2.0"),
        (["--capture-sizes", "1", "8", "--max-batch", "4"], "capture_sizes: got [1, 8]"),
        (["--kv-cache-dtype", "fp4"], "--kv-cache-dtype"),
        (["--kv-cache-dtype", "fp16"], "kv_cache_dtype: got 'fp16'"),
        (["--tensor-parallel-size", "2"], "tensor-parallel-size"),
        (["--tool-call-parser", "x"], "tool_call_parser: got 'x'"),
        (["--max-context", "1000000"], "max_context"),
        (["--api-key", "a b"], "api_key"),
    ],
)
def test_wrong_flags_are_named(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(TINY_LLAMA), "--device", "cpu", "--port", "0", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["run-batch", "-i", "x", "-o", "y"]])
def test_missing_extra_is_named(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("ostinato.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main([command[0], str(TINY_LLAMA), *command[1:]]) == 2
    assert "pip install 'ostinato[serve]'" in capsys.readouterr().err


def test_port_that_another_listens_on_meanwhile_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = bind("127.0.0.1", port)  # allowed while nobody listens
    with first:
        first.listen()
        assert not serve(make_service(), second)
    assert f"port {port}: cannot be listened on: Address already in use" in caplog.text


def test_port_in_use_is_found_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(TINY_LLAMA), "--port", port]) == 2
    error = f"--host, --port: got 127.0.0.1, {port}: Address already in use"
    assert error in capsys.readouterr().err
