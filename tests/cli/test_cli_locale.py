"""Arguments in UTF-8 are taken in any locale."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cli.command import as_utf8

_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}


def _run(*arguments: str | bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ostinato", *arguments]
    return subprocess.run(command, env={**os.environ, **_ASCII}, capture_output=True, timeout=120)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_what_an_ascii_locale_decodes_is_utf8_again(text: str) -> None:
    assert as_utf8(text) == text
    assert as_utf8(text.encode().decode("ascii", errors="surrogateescape")) == text


@pytest.mark.parametrize("content", [b"\xff", b"\xc3", b"a\x80", b"\xed\xa0\x80"])
def test_what_is_no_utf8_is_refused(content: bytes) -> None:
    for encoding in ("ascii", "utf-8"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected UTF-8"):
            as_utf8(content.decode(encoding, errors="surrogateescape"))
    with pytest.raises(argparse.ArgumentTypeError, match="expected UTF-8"):
        as_utf8("\ud800")


def test_prompts_stops_and_folders_in_an_ascii_locale(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    shutil.copytree(checkpoint, folder)
    prompts = ["größer", "日本", "🎉"]
    options = ["--stop", "ß", "--max-tokens", "2", "--no-verify", "--json"]
    done = _run("generate", str(folder), *prompts, *options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [completion["prompt"] for completion in document["completions"]] == prompts
    assert document["model"] == str(folder)
    lengths = [completion["prompt_tokens"] for completion in document["completions"]]
    assert lengths == [len(prompt.encode()) for prompt in prompts]


def test_prompts_of_a_file_with_such_a_name(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "süß.txt"
    file.write_text("größer\n", encoding="utf-8")
    options = ["--prompts-file", str(file), "--max-tokens", "2", "--no-verify"]
    done = _run("generate", str(checkpoint), *options)
    assert done.returncode == 0, done.stderr


def test_checkpoints_of_such_names_are_quantised(checkpoint: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "größe", tmp_path / "kürzer"
    shutil.copytree(checkpoint, source)
    done = _run("quantize", str(source), str(target), "--scheme", "int8")
    assert done.returncode == 0, done.stderr
    assert (target / "config.json").is_file()
    refused = _run("quantize", str(source), str(target) + "2", "--scheme", "int8", "--ignore", "ß")
    assert refused.returncode == 2
    assert b"Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["generate", "MODEL", b"a", b"\xff"], "ostinato generate: error: prompt 2: got "),
        (
            ["generate", "MODEL", "a", "--stop", b"\xff"],
            "error: argument --stop: got '\\udcff'",
        ),
        (["quantize", "MODEL", "new", "--scheme", "int8", "--ignore", b"\xff"], "--ignore: got "),
    ],
)
def test_other_bytes_are_refused_in_one_line(
    arguments: list[str | bytes], error: str, checkpoint: Path
) -> None:
    done = _run(*(str(checkpoint) if word == "MODEL" else word for word in arguments))
    assert done.returncode == 2
    assert error in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
