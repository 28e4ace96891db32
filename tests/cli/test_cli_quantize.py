"""`quantize`: a folder in, a smaller folder out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.checkpoint import load_model
from ostinato.cli.main import main
from ostinato.models import DenseLinear, W8A8Linear

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("scheme", DTYPES)
def test_the_result_loads_and_generates(
    scheme: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "quantised"
    assert main(["quantize", str(checkpoint), str(target), "--scheme", scheme]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: {scheme} weights, 0.0")
    assert load_model(target, max_context=8).layers[0].qkv.weight.dtype == DTYPES[scheme]
    assert main(["generate", str(target), "Hello", "--max-tokens", "2"]) == 0


@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
def test_a_kv_cache_is_calibrated_and_served(
    kv_cache: str,
    scheme: str | None,
    checkpoint: Path,
    tmp_path: Path,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, text = tmp_path / "quantised", tmp_path / "text.txt"
    text.write_text("What it is like to be served. " * 20)
    flags = ["--kv-cache", kv_cache, "--calibrate", str(text), "--device", str(device)]
    flags += [] if scheme is None else ["--scheme", scheme]
    assert main(["quantize", str(checkpoint), str(target), *flags]) == 0
    printed = capsys.readouterr().out
    kind = "weights as they were" if scheme is None else f"{scheme} weights"
    assert f": {kind}, 0.0" in printed
    assert printed.endswith(f"; scales of an {kv_cache} KV cache\n")
    served = ["generate", str(target), "Hello", "--max-tokens", "2", "--device", str(device)]
    assert main(served) == 0
    note = f"KV cache: {kv_cache}, static scales of the checkpoint per layer"
    assert note in capsys.readouterr().err


def test_ignored_modules_stay_as_they_are(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "quantised"
    ignore = ("--ignore", "re:.*o_proj", "--ignore", "re:.*down_proj")
    assert main(["quantize", str(checkpoint), str(target), "--scheme", "int8", *ignore]) == 0
    model = load_model(target, max_context=8)
    assert isinstance(model.layers[0].down, DenseLinear)
    assert isinstance(model.layers[0].qkv, W8A8Linear)
    assert isinstance(model.lm_head, DenseLinear)


def test_the_output_projection_is_quantised_when_asked(checkpoint: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "untied", tmp_path / "quantised"
    shutil.copytree(checkpoint, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0
    save_file(weights, source / "model.safetensors")
    assert main(["quantize", str(source), str(target), "--scheme", "int8", "--lm-head"]) == 0
    assert isinstance(load_model(target, max_context=8).lm_head, W8A8Linear)


def test_a_text_calibrates(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The import statement combines two operations. " * 9)
    folders = [tmp_path / "plain", tmp_path / "calibrated"]
    for folder, how in zip(folders, ([], ["--calibrate", str(text)]), strict=True):
        assert main(["quantize", str(checkpoint), str(folder), "--scheme", "int8", *how]) == 0
    plain, calibrated = (load_model(folder, max_context=8).layers[0] for folder in folders)
    assert not torch.equal(plain.down.weight, calibrated.down.weight)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("{source} {new}", "got neither --scheme nor --kv-cache, expected one of them or both"),
        ("{source} {new} --kv-cache fp8", "--kv-cache needs --calibrate"),
        ("{source} {new} --kv-cache fp8 --scheme int8", "--kv-cache needs --calibrate"),
        (
            "{source} {new} --kv-cache fp8 --calibrate x --ignore lm_head",
            "--ignore goes with --scheme",
        ),
        (
            "{source} {new} --kv-cache fp8 --calibrate x --lm-head",
            "--lm-head goes with --scheme",
        ),
        (
            "{source} {new} --scheme int8 --lm-head",
            "lm_head: the checkpoint quantises it, but tie_",
        ),
        ("{source} {new} --kv-cache fp4", "argument --kv-cache: invalid choice: 'fp4'"),
        ("{source} {new} --kv-cache fp8 --calibrate {new}", "{new}: "),
        ("{source} {new} --kv-cache fp8 --calibrate {source}", "{source}: got a folder"),
        ("{source} {new} --scheme fp8 --calibrate {source}", "calibrate: got a text for 'fp8'"),
        ("{source} {new} --scheme int8 --calibrate {new}", "{new}: cannot be read"),
        ("{source} {new} --scheme int4", "argument --scheme: invalid choice: 'int4'"),
        ("{source} --scheme int8", "the following arguments are required: DST"),
        ("{new}/none {new} --scheme int8", "SRC: got '{new}/none', which does not exist"),
        ("{source} {source} --scheme int8", "dst: got {source}, which exists"),
        ("{source} {new} --scheme int8 --ignore lm_head --ignore x", "ignore: got 'x'"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: str,
    error: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = tmp_path / "new"
    argv = [argument.format(source=checkpoint, new=new) for argument in arguments.split()]
    assert main(["quantize", *argv]) == 2
    printed = capsys.readouterr()
    message = error.format(source=checkpoint, new=new)
    assert printed.err.startswith(f"ostinato quantize: error: {message}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not new.exists()
