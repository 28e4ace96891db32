"""`generate`: what it prints, where, and what it refuses."""

from __future__ import annotations

import argparse
import io
import json
import runpy
import shutil
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.cli.main import main
from ostinato.cli.sampling import add_sampling_flags
from ostinato.engine import Engine, SamplingParams
from ostinato.jit.errors import MissingKernelError

Generate = Callable[..., dict[str, Any]]


@pytest.fixture
def generate(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Run `generate --json` and return its document."""

    def run(*arguments: str) -> dict[str, Any]:
        assert main(["generate", "--json", str(checkpoint), *arguments]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        document: dict[str, Any] = json.loads(printed.out)
        return document

    return run


def test_one_text_goes_alone_to_stdout(
    checkpoint: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, params = "Hello", SamplingParams(max_tokens=12)
    model = load_model(checkpoint, device=device, max_context=32)
    engine = Engine(model, load_tokenizer(checkpoint), max_batch=1)
    engine.capture([1], progress=False)
    [expected] = engine.generate([prompt], params)
    flags = ["--max-tokens", "12", "--max-context", "32", "--device", str(device)]
    assert main(["generate", str(checkpoint), prompt, *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected.text + "\n"
    for part in ("bit-equal", "prefill   5 tokens in 1 step", "decode    11 tokens in 11 steps"):
        assert part in printed.err
    for part in ("median", "p99", "tokens/s", "padding   0 rows, 0.0%"):
        assert part in printed.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_that_gives_nan_is_told(
    as_json: bool, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = load_file(broken / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.0.mlp.{name}.weight"] *= 1e30
    save_file(weights, broken / "model.safetensors")
    flags = ["--max-tokens", "3", *(["--json"] if as_json else [])]
    assert main(["generate", str(broken), "Hello", "a~b", *flags]) == 1
    printed = capsys.readouterr()
    assert "prompt 1, 2: the model's logits are NaN, where the text ends\n" in printed.err
    if as_json:
        texts = json.loads(printed.out)["completions"]
        assert [text["finish_reason"] for text in texts] == ["error", "error"]


def test_several_texts_stand_under_headers(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["Hello", "A longer prompt", "x"]
    assert main(["generate", str(checkpoint), *prompts, "--max-tokens", "4"]) == 0
    printed = capsys.readouterr()
    headers = [line for line in printed.out.splitlines() if line.startswith("==>")]
    assert headers == [f"==> {n}/3: {prompt}" for n, prompt in enumerate(prompts, start=1)]
    assert "3 batch sizes captured" in printed.err


def test_json_is_all_that_stdout_gets(generate: Generate, checkpoint: Path) -> None:
    document = generate("Hello", "x y", "abc", "--max-tokens", "5", "--batch-sizes", "4")
    assert document["model"] == str(checkpoint)
    assert document["device"] == "cpu"
    assert document["interrupted"] is False
    assert torch.__version__.startswith(document["versions"]["torch"])
    assert [graph["batch_size"] for graph in document["capture"]["graphs"]] == [4]
    assert [c["prompt"] for c in document["completions"]] == ["Hello", "x y", "abc"]
    assert [c["prompt_tokens"] for c in document["completions"]] == [5, 3, 3]
    for completion in document["completions"]:
        assert len(completion["token_ids"]) == 5
        assert completion["finish_reason"] == "length"
        assert isinstance(completion["text"], str)
    latencies = document["latencies"]
    assert latencies["tokens"] == 15
    assert latencies["prefill"]["tokens"] == 11
    assert latencies["decode"]["tokens"] == 12
    assert 0 < latencies["decode"]["median_ms"] <= latencies["decode"]["p99_ms"]
    assert latencies["padding_rows"] == 4 * latencies["decode"]["steps"] - 12
    assert 0 < latencies["padding_waste"] < 1


def test_a_run_without_decode_steps(generate: Generate, checkpoint: Path) -> None:
    decode = generate("Hello", "--max-tokens", "1")["latencies"]["decode"]
    assert decode == {
        "steps": 0,
        "tokens": 0,
        "median_ms": None,
        "p99_ms": None,
        "tokens_per_s": None,
    }
    assert main(["generate", str(checkpoint), "Hello", "--max-tokens", "1"]) == 0


def test_seeds_follow_each_other_and_reproduce_a_text(generate: Generate) -> None:
    sampling = ("--temperature", "1", "--max-tokens", "8")
    both = generate("Hello", "Hello", *sampling, "--seed", "7")["completions"]
    assert [c["seed"] for c in both] == [7, 8]
    assert both[0]["token_ids"] != both[1]["token_ids"]
    [second] = generate("Hello", *sampling, "--seed", "8")["completions"]
    assert second["token_ids"] == both[1]["token_ids"]


def test_the_drawn_seed_is_shown(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(checkpoint), "Hello", "--temperature", "1", "--max-tokens", "8"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    seed = printed.err.split()[-1]
    assert main([*argv, "--seed", seed]) == 0
    assert capsys.readouterr().out == printed.out


def test_every_sampling_parameter_reaches_the_engine(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.125,
        repetition_penalty=1.5,
        seed=6,
        stop=("one", "two"),
        stop_token_ids=(7, 8),
        ignore_eos=True,
    )
    submitted = []
    submit = Engine.submit

    def watch(self: Engine, prompt: Any, params: Any = None) -> int:
        submitted.append(params)
        return submit(self, prompt, params)

    monkeypatch.setattr(Engine, "submit", watch)
    numbers = "--max-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.75 --min-p 0.125 --seed 6"
    rest = "--repetition-penalty 1.5 --stop one --stop two --stop-token-ids 7,8 --ignore-eos"
    generate("Hello", *numbers.split(), *rest.split())
    assert submitted == [expected]


def test_flags_state_the_defaults_of_sampling_params() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    flags = {action.dest: action.help or "" for action in parser._actions}
    of_python_alone = {"logit_bias", "logprobs", "prompt_logprobs", "structured"}
    assert of_python_alone.isdisjoint(flags)
    for field in fields(SamplingParams):
        if field.name in of_python_alone:
            continue
        assert field.name in flags
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
            assert f"(default {field.default}" in flags[field.name]


def test_flags_reach_an_engine_that_serves_them(generate: Generate) -> None:
    def tokens(*flags: str) -> list[int]:
        (completion,) = generate("one", "--max-tokens", "12", *flags)["completions"]
        found: list[int] = completion["token_ids"]
        return found

    plain = tokens("--ignore-eos")
    assert tokens("--ignore-eos", "--frequency-penalty", "2") != plain
    assert len(tokens("--stop-token-ids", str(plain[0]), "--min-tokens", "12")) == 12


@pytest.mark.parametrize("argv", [["--prompts-file", "{file}"], ["-"], []])
def test_prompts_from_a_file_and_stdin(
    argv: list[str], generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    arguments = [argument.format(file=file) for argument in argv]
    completions = generate(*arguments, "--max-tokens", "2")["completions"]
    assert [c["prompt"] for c in completions] == ["one", "two"]


def test_prompts_may_stand_on_either_side_of_the_options(generate: Generate) -> None:
    completions = generate("one", "--max-tokens", "2", "two", "--", "--three")["completions"]
    assert [c["prompt"] for c in completions] == ["one", "two", "--three"]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("", [1, 2, 3]),
        ("--max-batch 2", [1, 2]),
        ("--batch-sizes 2", [2]),
        ("--batch-sizes 1 --max-batch 3", [1]),
        ("--page-size 4 --num-pages 9", [1, 2, 3]),
        ("--no-verify", [1, 2, 3]),
    ],
)
def test_sizes_change_no_text(flags: str, sizes: list[int], generate: Generate) -> None:
    arguments = ("one", "two", "three", "--max-tokens", "20")
    expected = generate(*arguments, "--max-context", "32")
    document = generate(*arguments, *flags.split())
    assert [graph["batch_size"] for graph in document["capture"]["graphs"]] == sizes
    verdict = "not verified" if flags == "--no-verify" else "bit-equal"
    assert {graph["verdict"] for graph in document["capture"]["graphs"]} == {verdict}
    for key in ("text", "token_ids"):
        got = [completion[key] for completion in document["completions"]]
        assert got == [completion[key] for completion in expected["completions"]]


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("", "fp32"),
        ("--kv-cache-dtype fp32", "fp32"),
        ("--kv-cache-dtype fp8", "fp8, a scale per token and head"),
        ("--kv-cache-dtype fp8 --kv-scales static", "fp8, static scales of 1"),
        ("--kv-cache-dtype int8 --kv-scales token", "int8, a scale per token and head"),
    ],
)
def test_the_kv_cache_is_as_asked_for(flags: str, note: str, generate: Generate) -> None:
    document = generate("Hello", "--max-tokens", "3", *flags.split())
    assert document["capture"]["notes"]["KV cache"] == note


def test_preemptions_are_reported(
    generate: Generate, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("one", "two", "--max-tokens", "30", "--page-size", "4", "--num-pages", "10")
    assert generate(*arguments)["latencies"]["preemptions"] == 1
    assert main(["generate", str(checkpoint), *arguments]) == 0
    assert "preempted 1 time: more --num-pages would avoid it" in capsys.readouterr().err


def test_the_context_ends_a_text(generate: Generate) -> None:
    [completion] = generate("Hello", "--max-context", "8")["completions"]
    assert len(completion["token_ids"]) == 3
    assert completion["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("x --max-tokens 0", "max_tokens: got 0"),
        ("x --max-tokens some", "argument --max-tokens: invalid int value: 'some'"),
        ("x --temperature -1", "temperature: got -1.0"),
        ("x --temperature nan", "temperature: got nan"),
        ("x --top-k -1", "top_k: got -1"),
        ("x --top-p 0", "top_p: got 0.0"),
        ("x --min-p 2", "min_p: got 2.0"),
        ("x --repetition-penalty 0", "repetition_penalty: got 0.0"),
        ("x --seed -1", "seed: got -1"),
        ("x --stop=", "stop: got ('',)"),
        ("x --stop-token-ids 1;2", "argument --stop-token-ids: got '1;2', expected integers"),
        ("x --batch-sizes=", "batch_sizes: got []"),
        ("x --batch-sizes 0", "batch_sizes: got [0]"),
        ("x --batch-sizes 1,1", "batch_sizes: got [1, 1]"),
        ("x --batch-sizes 4,2", "batch_sizes: got [4, 2]"),
        ("x --batch-sizes 1,4 --max-batch 2", "batch_sizes: got [1, 4]"),
        ("x --batch-sizes 1,,2", "argument --batch-sizes: got '1,,2'"),
        ("x --max-batch 0", "max_batch: got 0"),
        ("x --max-context 1", "max_context: got 1, expected 2 to the model's 65536"),
        ("x --max-context 65537", "max_context: got 65537, expected 2 to the model's 65536"),
        ("x --page-size 0", "page_size: got 0"),
        ("x --kv-cache-dtype e5m2", "argument --kv-cache-dtype: invalid choice: 'e5m2'"),
        ("x --kv-cache-dtype bf16", "kv_cache_dtype: got 'bf16', expected 'auto', 'fp8', 'int8'"),
        ("x --kv-scales token", "kv_scales: got 'token', expected None for pages of torch.float3"),
        (
            "x --kv-cache-dtype int8 --kv-scales static",
            "kv_scales: got 'static', but the checkpoint has no scales of an INT8 cache",
        ),
        ("x --num-pages 1", "num_pages: got 1"),
        ("x --num-pages 1000000000000000", "num_pages: got 1000000000000000, expected at most "),
        ("x --num-pages 100000000000", "num_pages: got 100000000000, expected at most "),
        ("x --max-batch 1000000000000", "max_batch: got 1000000000000, expected at most "),
        ("x --page-size 1000000000000", "num_pages: got None, but"),
        ("x --page-size 1000000000000 --num-pages 2", "num_pages: got 2, expected at most 0: each"),
        ("x much-too-long --max-context 8", "prompt 2: prompt: got 13 tokens"),
        ("x --max-tokens 99 --page-size 4 --num-pages 9", "prompt 1: prompt: got 1 tokens, which"),
        ("x --device tpu", "--device: got 'tpu'"),
        ("x --device cuda:x", "--device: got 'cuda:x'"),
        ("x --device cuda:99", "--device: got 'cuda:99', but torch finds"),
        ("x --prompts-file prompts.txt", "got prompts both as arguments and in --prompts-file"),
        ("--prompts-file missing.txt", "missing.txt: No such file or directory"),
        ("x --volume 11", "unrecognized arguments: --volume"),
    ],
)
def test_bad_values_are_refused_in_one_line(
    arguments: str, error: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(checkpoint), *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ostinato generate: error: {error}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("prompts", [["x", "x", ""], ["x", "x", "", ""]])
@pytest.mark.parametrize("flags", [[], ["--max-tokens", "1"], ["--max-context", "1"]])
def test_an_empty_prompt_is_refused(
    prompts: list[str],
    flags: list[str],
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", str(checkpoint), *prompts, *flags]) == 2
    error = "ostinato generate: error: prompt 3: got no tokens, expected at least one\n"
    assert capsys.readouterr().err == error


def test_an_empty_prompt_alone_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(checkpoint), "", "--max-tokens", "1"]) == 2
    assert "error: prompt 1: got no tokens" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["no folder", "no tokenizer", "cut weights", "no config"])
def test_damaged_checkpoints_are_refused_in_one_line(
    damage: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "damaged"
    if damage != "no folder":
        folder.mkdir()
        for file in checkpoint.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    if damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "no config":
        (folder / "config.json").write_text("[]")
    elif damage == "cut weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["generate", str(folder), "x"]) == 2
    printed = capsys.readouterr()
    missing = damage in ("no folder", "no tokenizer")  # a file that is damaged is named itself
    where = f"MODEL: got '{folder}'" if missing else f"{folder}/"
    assert printed.err.startswith(f"ostinato generate: error: {where}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("place", ["load_model", "capture"])
def test_a_kernel_that_is_not_compiled_is_named_with_the_command(
    place: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = "kernel k is not compiled: run `python -m ostinato build --only k` before"

    def missing(*_arguments: object, **_flags: object) -> None:
        raise MissingKernelError(message)

    if place == "load_model":
        monkeypatch.setattr("ostinato.checkpoint.load_model", missing)
    else:
        monkeypatch.setattr("ostinato.engine.decode_step.DecodeStep.__call__", missing)
    assert main(["generate", str(checkpoint), "x"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("ostinato generate: error: ")
    assert message in printed.err


class _CtrlC:
    """Presses Ctrl-C in an engine step, once or at every step from there on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_step: int, times: int = 1) -> None:
        step, self.steps = Engine.step, 0

        def pressed(engine: Engine) -> object:
            self.steps += 1
            if self.steps == at_step:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return step(engine)

        monkeypatch.setattr(Engine, "step", pressed)


def test_ctrl_c_keeps_the_texts_so_far(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", str(checkpoint), "one", "two", "three", "--max-batch", "2"]
    assert main([*argv, "--max-tokens", "50"]) == 0
    whole = capsys.readouterr().out
    _CtrlC(monkeypatch, at_step=20)
    handler = signal.getsignal(signal.SIGINT)
    assert main([*argv, "--max-tokens", "50"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    printed = capsys.readouterr()
    first, second = printed.out.split("\n\n==> 2/3: two\n")
    assert whole.startswith(first)
    assert len(first) > len("==> 1/3: one\n")
    assert whole.split("==> 2/3: two\n")[1].startswith(second.rstrip("\n"))
    assert "three" not in printed.out
    assert "decode " in printed.err


def test_ctrl_c_keeps_the_json_document(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _CtrlC(monkeypatch, at_step=5)
    assert main(["generate", str(checkpoint), "one", "two", "--json"]) == 130
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"] is True
    for completion in document["completions"]:
        assert completion["finish_reason"] == "cancelled"
        assert 1 <= len(completion["token_ids"]) <= 5


def test_a_second_ctrl_c_does_not_wait_for_the_step(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctrl_c = _CtrlC(monkeypatch, at_step=5, times=2)
    assert main(["generate", str(checkpoint), "one"]) == 130
    assert ctrl_c.steps == 5
    assert capsys.readouterr().out


def test_the_example_script_runs(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parents[2] / "examples" / "generate.py"
    monkeypatch.setattr("sys.argv", [str(script), str(checkpoint)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("The import statement") == 2
