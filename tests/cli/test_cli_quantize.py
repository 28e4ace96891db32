"""`quantize`: a folder in, a smaller folder out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


def test_ignored_modules_stay_as_they_are(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "quantised"
    ignore = ("--ignore", "lm_head", "--ignore", "re:.*down_proj")
    assert main(["quantize", str(checkpoint), str(target), "--scheme", "int8", *ignore]) == 0
    layer = load_model(target, max_context=8).layers[0]
    assert isinstance(layer.down, DenseLinear)
    assert isinstance(layer.o, W8A8Linear)


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
        ("{source} {new} --scheme fp8 --calibrate {source}", "calibrate: got a text for 'fp8'"),
        ("{source} {new} --scheme int8 --calibrate {new}", "{new}: No such file or directory"),
        ("{source} {new}", "the following arguments are required: --scheme"),
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
