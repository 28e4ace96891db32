"""The programs of examples/ run as a user would run them."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import runpy
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM
from try_dist import widen

from ostinato.engine import SamplingParams

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TINY = EXAMPLES / "tiny-llama"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_op_runs_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run("own_op", monkeypatch)
    out = capsys.readouterr().out
    assert out.count("bit-equal") == 4
    assert out.endswith("largest weight of each row: [5, 17, 42]\n")


def test_quantize_and_generate_compares_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    widen(TINY, tmp_path / "wide")
    _run("quantize_and_generate", monkeypatch, tmp_path / "wide", tmp_path / "int8")
    sizes = re.findall(r"^(wide|int8): ([\d.]+) MB", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in sizes] == ["wide", "int8"]
    assert float(sizes[1][1]) < 0.7 * float(sizes[0][1])


def test_transformers_model_decodes_as_generate_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run("transformers_model", monkeypatch)
    rows = re.findall(r"^\[([\d, ]+)\] -> \[([\d, ]+)\]$", capsys.readouterr().out, re.MULTILINE)
    example = _module("transformers_model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(example.SMALL, dtype=torch.float32).eval()
    assert len(rows) == len(example.PROMPTS)
    for prompt, found in rows:
        ids = torch.tensor([[int(token) for token in prompt.split(",")]])
        settings = {"max_new_tokens": example.STEPS, "do_sample": False, "eos_token_id": None}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert expected[0, ids.size(1) :].tolist() == [int(token) for token in found.split(",")]


def test_generate_streams_and_serves_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run("generate", monkeypatch)
    out = capsys.readouterr().out
    example = _module("generate")
    assert "bit-equal" in out
    assert all(prompt in out for prompt in example.PROMPTS)
    assert len(re.findall(r"\[\d+ tokens, (?:stop|length)\]$", out, re.MULTILINE)) == 3


def test_evaluate_names_the_loss_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    corpus = importlib.import_module("tiny_corpus")
    held_out = corpus.END_OF_TEXT + "A list is a sequence." + corpus.END_OF_TEXT + "So is a tuple."
    monkeypatch.setattr(corpus, "split_corpus", lambda: ("", held_out))
    checkpoints = [f"first={TINY}", f"second={TINY}"]
    _run("evaluate_tiny", monkeypatch, *checkpoints, "--json", tmp_path / "quality.json")
    rows = json.loads((tmp_path / "quality.json").read_text(encoding="utf-8"))["rows"]
    assert [row["impl"] for row in rows] == ["first", "second"]
    assert 0 < rows[0]["bits_per_byte"] == rows[1]["bits_per_byte"] < 8
    assert rows[1]["loss"] == 0
    assert "second" in capsys.readouterr().out


def test_each_example_is_run_by_a_test() -> None:
    files = [*(ROOT / "tests").rglob("test_*.py"), ROOT / "tests" / "real" / "real_models.py"]
    tests = "".join(file.read_text(encoding="utf-8") for file in files)
    ways = ('_run("{}"', '_module("{}")', 'import_module("{}")', '"{}.py"')
    for example in EXAMPLES.glob("*.py"):
        assert any(way.format(example.stem) in tests for way in ways), example.name


def test_chat_remembers_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    example = _module("chat_smollm2")
    monkeypatch.setattr(example, "SAMPLING", SamplingParams(max_tokens=6))
    chat = example.Chat(folder)
    first = "".join(chat.answer("A list display is"))
    second = "".join(chat.answer("Classes"))
    assert first
    assert [message["content"] for message in chat._messages] == [
        "A list display is",
        first,
        "Classes",
        second,
    ]


@pytest.mark.parametrize("end", ["", "\n"], ids=["end of input", "empty line"])
def test_the_chat_ends(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nBye\n" + end))
    assert list(_module("chat_smollm2").typed()) == ["Hello", "Bye"]
