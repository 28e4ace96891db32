"""`run-batch` and `chat`: requests of a file, and of the terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.main import main
from ostinato.server.batch import BatchError, finished_lines
from serving import CHATML

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
FLAGS = ["--device", "cpu", "--no-verify", "--max-batch", "2", "--max-context", "64"]


def _line(name: str, **body: Any) -> str:
    url = "/v1/completions"
    body = {"prompt": name, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_batch_keeps_its_order_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [_line(f"r{n}", max_tokens=1 + 7 * (n % 3)) for n in range(7)]
    lines[2] = _line("r2", frob=1)
    lines[3] = "no json"
    lines[4] = json.dumps({"custom_id": "r4", "method": "POST", "url": "/v1/files", "body": {}})
    asked, told = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(lines) + "\n\n")
    command = ["run-batch", str(MODEL), "-i", str(asked), "-o", str(told), *FLAGS]
    assert main(command) == 1
    assert "3 of 7 requests" in capsys.readouterr().err
    answers = [json.loads(line) for line in told.read_text().splitlines()]
    assert [a["custom_id"] for a in answers] == ["r0", "r1", "r2", None, "r4", "r5", "r6"]
    codes = [answer["response"]["status_code"] for answer in answers]
    assert codes == [200, 200, 400, 400, 400, 200, 200]
    assert answers[1]["response"]["body"]["usage"]["completion_tokens"] == 8

    kept = told.read_text().splitlines()[:5]
    told.write_text("\n".join(kept) + "\n" + '{"id": "5", "custom_id": "r5", "resp')
    assert main(command) == 0  # what is left is well
    again = [json.loads(line) for line in told.read_text().splitlines()]
    assert again[:5] == answers[:5]
    texts = [a["response"]["body"]["choices"][0]["text"] for a in answers[5:]]
    assert [a["response"]["body"]["choices"][0]["text"] for a in again[5:]] == texts


def test_answers_of_other_requests_are_not_continued(tmp_path: Path) -> None:
    asked, told = tmp_path / "in", tmp_path / "out"
    asked.write_text(_line("a") + "\n" + _line("b") + "\n")
    a, b, c = (f'{{"id": "1", "custom_id": "{name}", "response": {{}}}}\n' for name in "abc")

    def finished(content: str) -> int:
        told.write_text(content)
        try:
            with asked.open("rb") as requests:
                return finished_lines(requests, told)
        except BatchError:
            assert told.read_text() == content
            raise

    for content, fault in (
        (b, "line 1 is not the answer"),
        (a + b + c, "line 3 is not the answer"),
        (asked.read_text(), "line 1 is not the answer"),
        (asked.read_text().rstrip(), "line 1 is not the answer"),
        ("precious data", "line 1 is no answer"),
        (a + "precious data", "line 2 is no answer"),
    ):
        with pytest.raises(BatchError, match=fault):
            finished(content)
    for half in ("", "{", '{"id": "2", "cust'):
        assert finished(a + half) == 1
        assert told.read_text() == a


def test_requests_of_a_pipe_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.write(write, (_line("a") + "\n" + _line("b") + "\n").encode())
    os.close(write)
    told = tmp_path / "out"
    try:
        command = ["run-batch", str(MODEL), "-i", f"/dev/fd/{read}", "-o", str(told), *FLAGS]
        assert main(command) == 0
    finally:
        os.close(read)
    answers = [json.loads(line) for line in told.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["a", "b"]


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("IN", "--output-file: got IN, which is the --input-file"),
        ("/dev/full", "--output-file: got /dev/full, expected a file or a name that is free"),
        ("FOLDER", "FOLDER"),
        ("/proc/x", "/proc/x: "),
    ],
)
def test_outputs_that_cannot_be_written_are_named(
    output: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_text(_line("a"))
    names = {"IN": str(asked), "FOLDER": str(tmp_path)}
    command = ["run-batch", str(MODEL), "-i", str(asked), "-o", names.get(output, output)]
    assert main([*command, *FLAGS]) == 2
    printed = capsys.readouterr().err
    for name, path in names.items():
        error = error.replace(name, path)
    assert error in printed
    assert printed.count("\n") == 1
    assert asked.read_text() == _line("a")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a copy of the tiny model with a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def test_chat_answers_lines_and_forgets_on_reset(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["hi", "/reset", "hi", "x" * 2000, "hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    flags = ["--max-tokens", "6", "--ignore-eos", *FLAGS[:-1], "128"]
    assert main(["chat", str(model), "--system", "be", *flags]) == 0
    out, err = capsys.readouterr()
    # The first answer comes again after /reset, but not where the model knows what was said.
    assert re.fullmatch(r"(.+\n)\1(?!\1)(.+\n)", out, re.DOTALL)
    assert "expected at most 128 together" in err


def test_chat_needs_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(MODEL), *FLAGS]) == 2
    said = capsys.readouterr().err
    assert "has no chat template" in said
    assert "captured" not in said  # it is said before a large model is loaded
