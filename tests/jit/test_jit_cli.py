"""`python -m ostinato build` and `kernels`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.cli.main import main
from ostinato.jit import compiler
from ostinato.jit.toolchain import Cutlass
from ostinato.ops.catalogue import CATALOGUE

_NAME = "quantize-silu_mul-bf16-int8"


def test_build_compiles_a_selection_with_progress(
    nvcc_calls: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", "--only", "quantize", "--dtypes", "int8", "bf16"]
    assert main(arguments) == 0
    first, *progress = capsys.readouterr().out.splitlines()
    count = len(progress)
    chosen = [v for v in CATALOGUE if v.family == "quantize" and v.in_dtype == "bf16"]
    assert count == sum(v.out_dtype in ("int8", "bf16") for v in chosen) > 4
    assert first == f"{count} kernels, 0 of them compiled already, in {cache}"
    assert [line.split("]")[0] for line in progress] == [
        f"[{i:{len(str(count))}}/{count}" for i in range(1, count + 1)
    ]
    assert any(f"{_NAME} (sm_90a, release): 0 s, 42 registers" in line for line in progress)

    assert main(arguments) == 0
    assert capsys.readouterr().out == (
        f"{count} kernels, {count} of them compiled already, in {cache}\n"
    )
    assert len(nvcc_calls.read_text().splitlines()) == count


def test_build_modes_are_builds_of_their_own(
    nvcc_calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", "--only", "gemm_small_m", "--dtypes", "int8", "bf16", "--jobs", "1"]
    site = "small_m_stage_release"
    assert main([*arguments, "--inject-delay", site]) == 0
    assert f"(sm_90a, inject-delay {site})" in capsys.readouterr().out
    assert all(
        f"-DOSTINATO_DELAY_SITE={site}" in line for line in nvcc_calls.read_text().splitlines()
    )
    assert main(arguments) == 0
    assert "0 of them compiled already" in capsys.readouterr().out


def test_build_compiles_for_each_of_the_gpus_named(
    nvcc_calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["embed-bf16", "gemm_small_m"]
    assert main(["build", "--only", *names, "--arch", "sm_80", "120", "compute_89"]) == 0
    progress = capsys.readouterr().out
    for target in ("sm_80", "sm_120", "compute_89"):
        assert f"embed-bf16 ({target}, release): 0 s" in progress
    calls = nvcc_calls.read_text().splitlines()
    codes = [
        word.rpartition("code=")[2] for line in calls for word in line.split() if "code=" in word
    ]
    assert sorted(codes) == ["compute_89", "sm_120", "sm_80"]  # none of gemm_small_m
    assert main(["kernels", "embed", "gemm_small_m", "--arch", "80"]) == 0
    assert capsys.readouterr().out.startswith("1 of 3 compiled for sm_80, in ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "--all", "--arch", "8"], "arch: got '8', expected one of 80, 86, "),
        (
            ["build", "--only", "gemm_small_m", "--arch", "80"],
            "--arch: got 80, which runs none of these kernels",
        ),
        (["kernels", "--arch", "80", "--budgets", "f"], "budgets: got sm_80, expected sm_90a: "),
    ],
)
def test_gpus_without_kernels_are_refused(
    nvcc_calls: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert not nvcc_calls.exists()


INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}


def _checkpoint(folder: Path, quantization: dict | None) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "torch_dtype": "float16",
    }
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Attention of head dim 16 is not in the catalogue: it is compiled for who asks for it.
_TILED = {"l2_probe-", "embed-", "quantize-", "append_kv-", "sample-", "gemm_tiled-"}
_TILED |= {"attention_decode-", "attention_prefill-", "process_logits-", "token_logprobs-"}
_OF_LOGITS = {"sample-fp32", "process_logits-fp32", "token_logprobs-fp32"}


@pytest.mark.parametrize(
    ("quantization", "families"),
    [
        # FP8 results must not depend on the batch, which rules the streaming GEMM out.
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, _TILED),
        (INT8, _TILED | {"gemm_small_m-", "fused_linear-", "activated_linear-"}),
        (None, _TILED),
    ],
    ids=["fp8", "int8", "plain"],
)
def test_build_for_a_model_takes_what_it_may_launch(
    tmp_path: Path,
    nvcc_calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quantization: dict | None,
    families: set[str],
) -> None:
    monkeypatch.setattr(compiler, "require_cutlass", lambda: Cutlass(tmp_path, "0"))
    monkeypatch.setattr(compiler, "find_cutlass", lambda: Cutlass(tmp_path, "0"))
    folder = _checkpoint(tmp_path, quantization)
    assert main(["build", "--for-model", str(folder)]) == 0
    built = {line.split("] ")[1].split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert {name[: name.index("-") + 1] for name in built} == families
    assert built - {variant.name for variant in CATALOGUE} == {
        name for name in built if name.startswith("attention_")
    }
    # Logits are fp32.
    assert all("-fp16" in name for name in built - {*_OF_LOGITS, "l2_probe-atomics"})
    operands = {name.split("-")[1] for name in built if name.startswith("gemm_tiled-")}
    expected = {"fp8": "e4m3", "compressed-tensors": "int8"}
    layers = "fp16" if quantization is None else expected[quantization["quant_method"]]
    assert operands == {layers, "fp16"}

    # The output projection has 16 bits, and a norm before it.
    count = 2 if quantization is None else 4
    assert main(["build", "--for-model", str(folder), "--only", "quantize"]) == 0
    assert capsys.readouterr().out.startswith(f"{count} kernels, {count} of them compiled already")


def test_build_for_a_model_takes_what_its_options_launch(
    tmp_path: Path,
    nvcc_calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compiler, "require_cutlass", lambda: Cutlass(tmp_path, "0"))
    monkeypatch.setattr(compiler, "find_cutlass", lambda: Cutlass(tmp_path, "0"))
    folder = str(_checkpoint(tmp_path, {"quant_method": "fp8", "activation_scheme": "dynamic"}))

    def built(*options: str) -> set[str]:
        assert main(["build", "--for-model", folder, *options]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        return {line.split("] ")[1].split()[0] for line in lines}

    fp32 = {name for name in built() if "-fp32" in name} - _OF_LOGITS
    assert fp32
    assert all(name.startswith("gemm_tiled-fp16-fp32-") for name in fp32)  # the 16-bit projection
    head = built("--lm-head", "int8")
    assert head
    assert all("int8-fp32" in name or name == "quantize-rms_norm-fp16-int8" for name in head)
    variant = built("--no-batch-invariant")
    assert {name[: name.index("-")] for name in variant} == {"attention_decode"}
    stored = built("--kv-cache-dtype", "int8")
    attends = "attention_prefill-fp16-d16-packed"  # to what is dequantised
    families = {name[: name.index("-")] for name in stored - {attends}}
    assert families == {"append_kv", "attention_decode", "dequantize_kv"}
    assert attends in stored
    assert all("int8" in name for name in stored - {attends})
    assert main(["build", "--all", "--kv-scales", "token"]) == 2
    assert "--kv-scales go with --for-model" in capsys.readouterr().err
    assert main(["build", "--all", "--lm-head", "int8"]) == 2
    assert "go with --for-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got no selection, expected --all, --only, --for-model or --dtypes"),
        (["--only", "gem"], "only: got 'gem', expected activated_linear or append_kv or"),
        (["--dtypes", "int4"], "invalid choice: 'int4'"),
        (["--all", "--jobs", "0"], "--jobs: got 0, expected at least 1"),
        (["--all", "--tp", "2"], "--tensor-parallel-size, --kv-cache-dtype, --kv-scales go with"),
        (["--all", "--tp", "0"], "--tensor-parallel-size: got 0, expected at least 1"),
        (
            ["--for-model", "examples/tiny-llama", "--tp", "5"],
            "model.layers.0.self_attn.q_proj: got 6 groups of 32 rows for 5 ranks, expected a mul",
        ),
        (["--all", "--inject-delay", "nowhere"], "--inject-delay: got 'nowhere', expected"),
        (["--for-model", "/nowhere"], "--for-model: got '/nowhere', which does not exist"),
        (["--all", "--only", "embed"], "--all: got --only beside it, expected it alone"),
        (["--for-model", "/nowhere", "--all"], "--all: got --for-model beside it, expected"),
        (["--all", "--dtypes", "int8"], "--all: got --dtypes beside it, expected it alone"),
    ],
)
def test_build_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["build", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ostinato build: error: ")
    assert message in said
    assert said.count("\n") == 1


def test_build_without_a_compiler(
    cache: Path, no_nvcc: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--only", _NAME]) == 1
    assert "nvcc not found" in capsys.readouterr().err


def test_build_needs_no_compiler_for_what_is_compiled(
    nvcc_calls: Path,
    cache: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["build", "--only", _NAME]) == 0
    request.getfixturevalue("no_nvcc")
    capsys.readouterr()
    assert main(["build", "--only", _NAME]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"1 kernels, 1 of them compiled already, in {cache}\n"
    assert printed.err == ""


def test_kernels_lists_what_is_compiled_and_what_is_not(
    nvcc_calls: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["build", "--only", _NAME])
    capsys.readouterr()
    assert main(["kernels"]) == 0
    first, header, *lines = capsys.readouterr().out.splitlines()
    assert first == f"1 of {len(CATALOGUE)} compiled for sm_90a, in {cache}"
    assert header.split() == ["kernel", "registers", "spills", "stack", "smem", "s"]
    assert [line.split()[0] for line in lines] == [variant.name for variant in CATALOGUE]
    (compiled,) = [line for line in lines if "not compiled" not in line]
    assert compiled.split()[:5] == [_NAME, "42", "0", "0", "128"]

    main(["kernels", "--compiled"])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_kernels_holds_them_to_their_budgets(
    nvcc_calls: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = tmp_path / "budgets.json"
    main(["build", "--only", _NAME])
    assert main(["kernels", _NAME, "--write-budgets", str(budgets)]) == 0
    assert main(["kernels", _NAME, "--budgets", str(budgets)]) == 0
    document = json.loads(budgets.read_text())
    document[_NAME]["registers"] = 41
    budgets.write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["kernels", "--budgets", str(budgets)]) == 1
    assert "    registers: got 42, expected at most 41\n" in capsys.readouterr().out


def test_kernels_of_which_none_is_compiled_have_no_budgets_to_keep(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = tmp_path / "budgets.json"
    budgets.write_text("{}")
    assert main(["kernels", _NAME, "--budgets", str(budgets)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"ostinato kernels: error: --budgets: none of 1 kernels is compiled, in {cache}: "
        "run `python -m ostinato build` before\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gem"], "only: got 'gem'"),
        (["--budgets", "/nowhere"], "/nowhere: No such file"),
        (["--budgets", "a", "--write-budgets", "b"], "exclude each other"),
    ],
)
def test_kernels_refuses_in_one_line(
    cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["kernels", *arguments]) == 2
    assert message in capsys.readouterr().err
