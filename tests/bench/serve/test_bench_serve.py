"""`bench serve`: against a server of ours, and against one that answers in odd pieces."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ostinato.bench.serve.client import Server, Stream
from ostinato.bench.serve.load import Lengths, Load, log_uniform, read_lengths, send_all
from ostinato.bench.serve.row import Limits, ServeRow
from ostinato.bench.serve.step import StepRow
from ostinato.cli.main import main
from serving import make_service, serving

EVENTS = (
    b'data: {"choices": [{"text": "a"}]}\n\n',
    b'data: {"choices": [{"text": "\xc3\xa9"}]}\n\n: a comment\n\n',
    b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n',
    b"data: [DONE]\n\n",
)


def test_load_on_our_server_makes_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "serve.json", tmp_path / "serve.svg"
    flags = ["--model", "tiny", "--requests", "9", "--prompt", "2", "20", "--output", "5"]
    flags += ["--vocab", "250", "--warm-up", "2", "--json", str(file), "--plot", str(picture)]
    with serving(make_service()) as client:
        url = ["bench", "serve", "--url", client.url]
        assert main([*url, *flags, "--concurrency", "3"]) == 0
        (row,) = json.loads(file.read_text())["rows"]
        assert main([*url, *flags, "--rate", "200", "--first-ms", "0.001"]) == 0
        (open_row,) = json.loads(file.read_text())["rows"]
        assert main([*url, *flags, "--concurrency", "1", "--model", "other"]) == 2
        client.wait_idle()
    assert row["case"] == "tiny c3 prompt2-20 out5"
    assert (row["requests"], row["failed"]) == (9, 0)
    assert row["output_tokens_s"] * row["seconds"] == pytest.approx(45, rel=0.01)
    assert row["good_s"] * row["seconds"] == pytest.approx(9, rel=0.01)
    assert row["first_ms"] == sorted(row["first_ms"])
    assert row["whole_ms"][0] > row["first_ms"][0] > 0
    assert open_row["case"] == "tiny rate200 prompt2-20 out5"
    assert open_row["good_s"] == 0
    assert "all 9 requests have failed: RefusedError: 404" in capsys.readouterr().err
    assert picture.stat().st_size > 1000


def test_steps_are_timed_as_bench_engine_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    flags = ["--model", "tiny", "--concurrency", "3", "--prompt", "8", "8", "--output", "4", "60"]
    flags += ["--vocab", "250", "--repeats", "2", "--json", str(file)]
    with serving(make_service()) as client:
        assert main(["bench", "serve", "--url", client.url, *flags]) == 0
        stats = client.ask(lambda engine: engine.stats)
        assert main(["bench", "serve", "--url", client.url, *flags, "--model", "other"]) == 2
        client.wait_idle()
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["section"], row["case"]) == ("step", "tiny b3 prompt8")
    assert len(row["short_s"]) == len(row["long_s"]) == 2
    medians = [sum(row[name]) / 2 for name in ("short_s", "long_s")]
    assert row["us"] == pytest.approx((medians[1] - medians[0]) / 56 * 1e6, rel=1e-3)
    # Three batches of short texts, one of them untimed, and two of long ones.
    assert stats.decode_tokens == 3 * (3 * 3 + 2 * 59)
    assert "a request of 4 tokens has failed: RefusedError: 404" in capsys.readouterr().err


def test_steps_need_a_longer_time_for_longer_texts() -> None:
    runs = [(1.0, 2.0), (1.5, 2.1), (0.9, 2.4)]
    row = StepRow.of("case", "impl", (10, 110), runs)
    assert (row.us, row.short_s, row.long_s) == (11000, (1.0, 1.5, 0.9), (2.0, 2.1, 2.4))
    with pytest.raises(ValueError, match="output: texts of 10 and 110 tokens took"):
        StepRow.of("case", "impl", (10, 110), [(2.0, 1.0)])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("chunked", [True, False])
def test_client_reads_streams_in_any_pieces(size: int, chunked: bool) -> None:
    body = b"".join(EVENTS)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    head = b"HTTP/1.1 200 OK\r\n"
    if chunked:
        head += b"Transfer-Encoding: chunked\r\n"
        pieces = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]
    stream = asyncio.run(_answered([head + b"\r\n", *pieces]))
    assert stream.error is None
    assert (len(stream.times), stream.tokens) == (2, 2)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 429 Too Many\r\n\r\n{}", "RefusedError: 429 {}"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS[0], "EOFError: the stream ended"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "m"}}\n', "RefusedError: {'mess"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {\n", "JSONDecodeError"),
        (b"SSH-2.0\r\n", "Error"),
        (b"", "Error"),
    ],
)
def test_client_says_what_went_wrong(answer: bytes, error: str) -> None:
    stream = asyncio.run(_answered([answer]))
    assert stream.error is not None
    assert error in stream.error


async def _answered(pieces: list[bytes]) -> Stream:
    """Send one request to a server that answers with these pieces."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await Server(f"http://127.0.0.1:{port}").stream({"prompt": "a"})


def test_no_server_is_an_error_of_each_request() -> None:
    load = Load("m", [Lengths(3, 2)] * 2, concurrency=1)
    streams, _ = asyncio.run(send_all(Server("http://127.0.0.1:9"), load))
    assert all("Error" in (stream.error or "") for stream in streams)
    with pytest.raises(ValueError, match="all 2 requests have failed"):
        ServeRow.of("case", "impl", streams, 1.0, Limits())


def test_row_has_percentiles_and_good_requests() -> None:
    streams = [Stream(0.0, [0.1 * n, 0.1 * n + 0.01, 0.1 * n + 0.03], 3) for n in range(1, 11)]
    row = ServeRow.of("case", "impl", streams, 2.0, Limits(first=500, between=20))
    assert row.first_ms == pytest.approx((500, 900, 1000))
    assert row.between_ms == pytest.approx((10, 20, 20))
    assert row.whole_ms == pytest.approx((530, 930, 1030))
    assert (row.output_tokens_s, row.good_s) == (15, 2.5)


def test_lengths_are_log_uniform_or_from_a_file(tmp_path: Path) -> None:
    lengths = log_uniform(16, 1024, 8, 2000, seed=1)
    prompts = sorted(each.prompt for each in lengths)
    assert 16 <= prompts[0] <= prompts[-1] <= 1024
    assert 100 < prompts[1000] < 160  # the geometric mean is 128
    file = tmp_path / "lengths"
    file.write_text("[3, 4]\n\n[5, 6]\n")
    assert read_lengths(file, 3) == [Lengths(3, 4), Lengths(5, 6), Lengths(3, 4)]
    file.write_text("[3, 4]\n[5]\n")
    with pytest.raises(ValueError, match="line 2: expected"):
        read_lengths(file, 3)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "rate, concurrency: got neither"),
        (["--rate", "0"], "rate: got 0"),
        (["--concurrency", "0"], "concurrency: got 0"),
        (["--rate", "1", "--prompt", "9", "3"], "prompt: got 9 to 3"),
        (["--rate", "1", "--vocab", "9"], "vocab: got 9"),
        (["--rate", "1", "--url", "ftp://x"], "url: got 'ftp://x'"),
        (["--rate", "1", "--output", "0"], "output, requests: got 0"),
        (["--concurrency", "1", "--output", "3", "2"], "output: got 3 2"),
        (["--concurrency", "1", "--output", "1", "2", "3"], "output: got 1 2 3"),
        (["--rate", "1", "--output", "2", "3"], "output: two numbers need --concurrency"),
        (["--concurrency", "1", "--output", "2", "3"], "prompt: got 128 to 2048"),
    ],
)
def test_wrong_loads_are_named(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--url", "http://x", "--model", "m", *flags]) == 2
    assert said in capsys.readouterr().err
