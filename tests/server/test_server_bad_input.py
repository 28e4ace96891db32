"""What clients may send that is wrong: each gets an answer, and the server serves on."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ostinato.server import Settings
from serving import Client, make_service, serving

PATH = "/v1/completions"
LIMITS = Settings(
    port=0,
    api_keys=("secret", "other"),
    max_body_bytes=20_000,
    max_head_bytes=4_000,
    body_timeout=1,
    head_timeout=1,
    max_choices=4,
    max_connections=40,
)
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def strict() -> Iterator[Client]:
    """Serve with narrow limits."""
    with serving(make_service(settings=LIMITS)) as client:
        yield replace(client, headers=KEY)


@pytest.fixture(autouse=True)
def _serves_on(strict: Client) -> Iterator[None]:
    yield
    strict.wait_idle()
    assert strict.complete("abc", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def _raw(client: Client, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes and return all that comes until the connection ends."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        pieces = []
        try:
            while piece := connection.recv(65536):
                pieces.append(piece)
        except ConnectionResetError:
            pass
    return b"".join(pieces)


def _post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    head = [
        f"POST {PATH} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        "authorization: Bearer secret",
        f"content-length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": ', None),
        (b"", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"prompt": "a\xff"}', None),
        (b"[" * 9000, None),
        (b'{"prompt": ' + b"[" * 9000, None),
        (b"{}", "prompt"),
        (b'{"prompt": ""}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [1, "a"]}', "prompt"),
        (b'{"prompt": [[1], [null]]}', "prompt"),
        (b'{"prompt": [true]}', "prompt"),
        (b'{"prompt": [-1]}', "prompt"),
        (b'{"prompt": [257]}', "prompt"),
        (b'{"prompt": [99999999999999999999999]}', "prompt"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "a", "\\ud800": 1}', None),
        (b'{"prompt": "a", "stop": ["\\ud800", 1]}', "stop"),
        (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1e400}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 128}', "max_tokens"),
        (b'{"prompt": "a", "max_completion_tokens": 0}', "max_completion_tokens"),
        (b'{"prompt": "a", "max_completion_tokens": 128}', "max_completion_tokens"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": -1}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e300}', "temperature"),
        (b'{"prompt": "a", "top_p": 0}', "top_p"),
        (b'{"prompt": "a", "top_k": 99999999999}', "top_k"),
        (b'{"prompt": "a", "seed": -1}', "seed"),
        (b'{"prompt": "a", "seed": 9223372036854775808}', "seed"),
        (b'{"prompt": "a", "n": 0}', "n"),
        (b'{"prompt": "a", "n": 5}', "n"),
        (b'{"prompt": ["a", "a", "a"], "n": 2}', "n"),
        (b'{"prompt": "a", "stop": ""}', "stop"),
        (b'{"prompt": "a", "stop_token_ids": [999]}', "stop_token_ids"),
        (b'{"prompt": "a", "best_of": 2}', "best_of"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options"),
        (b'{"prompt": "a", "stream": true, "stream_options": {"x": 1}}', "stream_options.x"),
    ],
)
def test_wrong_body_is_refused_by_name(strict: Client, body: bytes, param: str | None) -> None:
    error = strict.refused(body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert "Traceback" not in error["message"]
    assert "/site-packages" not in error["message"]


def test_unknown_fields_are_named_a_few_at_a_time(strict: Client) -> None:
    error = strict.refused({"prompt": "a", "frob": 1, "nicate": 2})
    assert "frob" in error["message"]
    assert "nicate" in error["message"]
    assert error["code"] == "unknown_field"
    many = {f"x{number}": 1 for number in range(1000)}
    assert "1001 fields" in strict.refused({"prompt": "a", **many})["message"]


def test_body_of_another_type_is_told_what_is_expected(strict: Client) -> None:
    data = _post(b'{"prompt": "a"}', "connection: close")
    answer = _raw(strict, data.replace(b"application/json", b"text/plain"))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in answer.partition(b"\r\n\r\n")[2]


def test_unknown_fields_that_are_null_say_nothing(strict: Client) -> None:
    strict.complete("a", max_tokens=2, best_of=None, suffix=None, store=None)
    assert strict.refused({"prompt": None})["param"] == "prompt"


def test_other_models_are_not_found(strict: Client) -> None:
    error = strict.refused({"prompt": "a", "model": "gpt-9"}, status=404)
    assert error["code"] == "model_not_found"


def test_wrong_method_is_refused(strict: Client) -> None:
    assert strict.get(PATH)[0] == 405


@pytest.mark.parametrize("key", [None, "Bearer ", "Bearer wrong", "Basic secret", "Bearer \xff"])
def test_requests_without_the_key_are_refused(strict: Client, key: str | None) -> None:
    headers = {} if key is None else {"authorization": key}
    stranger = replace(strict, headers=headers)
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
        status, document = stranger.get(path)
        assert (status, document["error"]["code"]) == (401, "invalid_api_key")
    assert stranger.get("/health")[0] == stranger.get("/ready")[0] == 200
    assert replace(strict, headers={"authorization": "bearer other"}).get("/v1/models")[0] == 200


@pytest.mark.parametrize("body", [{"prompt": "abc", "max_tokens": 1}, {"frob": 1}])
def test_answers_have_the_id_of_their_request(strict: Client, body: dict[str, object]) -> None:
    answer = strict.send("POST", PATH, body, {"x-request-id": "my-own_1.2"})
    assert answer.headers["x-request-id"] == "my-own_1.2"
    for wrong in ("a b", "x" * 65, ""):
        answer = strict.send("POST", PATH, body, {"x-request-id": wrong})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_internal_errors_tell_clients_nothing(
    strict: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("/a/secret/path")

    with monkeypatch.context() as patched:
        patched.setattr("ostinato.server.service.Service.check_model", fail)
        error = strict.refused({"prompt": "abc"}, status=500)
    assert (error["message"], error["code"]) == ("an internal error", "internal_error")


def test_no_answer_allows_other_origins(strict: Client) -> None:
    answer = strict.send("OPTIONS", PATH, headers={"origin": "http://evil.example"})
    answer.read()
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_huge_bodies_are_refused_before_they_come(strict: Client) -> None:
    answer = _raw(strict, _post(b"x", length=1 << 40))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert _raw(strict, _post(b"", length=10**30)).startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))


def test_chunked_bodies_are_counted(strict: Client) -> None:
    head = _post(b"", "transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    assert _raw(strict, head + b"1000\r\n" + b" " * 4096 + b"\r\n" * 1).count(b"408") >= 1
    chunks = (b"1000\r\n" + b" " * 4096 + b"\r\n") * 8
    assert _raw(strict, head + chunks).startswith(b"HTTP/1.1 413 ")


def test_heads_without_end_are_refused(strict: Client) -> None:
    start = b"GET /health HTTP/1.1\r\nx: " + b"a" * 5000
    assert _raw(strict, start).startswith(b"HTTP/1.1 431 ")
    assert _raw(strict, start + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    assert _raw(strict, b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "data", [b"", b"POST", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", _post(b"{", length=9)]
)
def test_slow_clients_are_not_waited_for(strict: Client, data: bytes) -> None:
    started = time.monotonic()
    assert _raw(strict, data).startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("data", [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01" * 9])
def test_what_is_no_http_is_refused(strict: Client, data: bytes) -> None:
    answer = _raw(strict, data)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"]


def test_half_closed_clients_have_left(strict: Client) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 120, "ignore_eos": True}).encode()
    _raw(strict, _post(body), half_close=True)
    _raw(strict, _post(body, length=len(body) + 1), half_close=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 0.002, 0.02, 0.1])
def test_clients_that_leave_cancel_their_request(
    strict: Client, stream: bool, after: float
) -> None:
    fields = {"prompt": "a" * 60, "max_tokens": 60, "ignore_eos": True, "stream": stream}
    data = _post(json.dumps(fields).encode())
    with socket.create_connection(("127.0.0.1", strict.port)) as connection:
        connection.sendall(data)
        time.sleep(after)


def test_too_many_connections_are_refused_in_words(strict: Client) -> None:
    idle = [socket.create_connection(("127.0.0.1", strict.port)) for _ in range(40)]
    try:
        answer = _raw(strict, b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer
    finally:
        for connection in idle:
            connection.close()
    time.sleep(0.1)


@pytest.mark.parametrize("chunked", [False, True])
def test_offered_upgrades_are_passed_over(strict: Client, chunked: bool) -> None:
    """As Java's client offers HTTP/2: the answer is that of the same request without."""
    body = b'{"prompt": "ab", "max_tokens": 2}'
    offer = (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        "authorization: Bearer secret\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        "upgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    ).encode()
    if chunked:
        offer += b"transfer-encoding: chunked\r\n\r\n"
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        offer += b"content-length: %d\r\n\r\n" % len(body)
    plain = _post(b'{"prompt": "ab", "max_tokens": 2}', "connection: close")
    answer = _raw(strict, offer + body + plain)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    with socket.create_connection(("127.0.0.1", strict.port), timeout=10) as connection:
        connection.sendall(offer + body[:7])
        time.sleep(0.1)
        connection.sendall(body[7:] + plain)
        pieces = b"".join(iter(lambda: connection.recv(65536), b""))
    assert pieces.count(b"HTTP/1.1 200 OK") == 2


def test_pipelined_requests_are_answered_in_order(strict: Client) -> None:
    one = _post(b'{"prompt": "a", "max_tokens": 1, "ignore_eos": true}')
    answer = _raw(strict, one + _post(b'{"prompt": 1}', "connection: close"))
    assert answer.index(b"HTTP/1.1 200 ") < answer.index(b"HTTP/1.1 400 ")
