"""A model on CUDA: packed weights, and kernels known beforehand."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import ops
from ostinato.checkpoint import load_model
from ostinato.jit import loader
from ostinato.jit.variant import Variant
from ostinato.models import (
    DenseLinear,
    W8A8Linear,
    compile_kernels,
    required_kernels,
    sequence_logits,
)
from ostinato.ops.attention import append_kv_cuda, decode_cuda, prefill_cuda
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.attention.l2_partition import L2Probe
from ostinato.ops.embed import Embed
from ostinato.ops.linear import dense_gemm, quantize_cuda, w8a8_gemm
from ostinato.ops.linear.quantize_cuda import Quantize
from ostinato.ops.sampling.process_logits import ProcessLogits
from ostinato.ops.sampling.sample_cuda import Sample
from ostinato.ops.sampling.token_logprobs import TokenLogprobsKernel
from tiny import tiny_llama

embed_module = import_module("ostinato.ops.embed")  # `ostinato.ops.embed` is the op

TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def layer(device: torch.device, dtype: torch.dtype) -> W8A8Linear:
    weight = torch.randint(-9, 9, (24, 40), dtype=torch.int8).to(dtype).to(device)
    return W8A8Linear(weight, torch.ones(24, device=device), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_weights_are_packed_on_cuda_only(dtype: torch.dtype, device: torch.device) -> None:
    weight = layer(device, dtype).weight
    assert isinstance(weight, ops.PackedWeight if device.type == "cuda" else torch.Tensor)
    assert (weight.shape, weight.dtype, weight.device.type) == ((24, 40), dtype, device.type)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dense_weights_of_16_bits_are_packed_on_cuda(
    dtype: torch.dtype, device: torch.device
) -> None:
    linear = DenseLinear(torch.zeros(24, 40, dtype=dtype, device=device))
    packs = device.type == "cuda" and dtype is not torch.float32
    assert isinstance(linear.weight, ops.PackedWeight if packs else torch.Tensor)
    assert (linear.shape, linear.weight_dtype) == ((24, 40), dtype)


def test_a_packed_dense_weight_serves_on_the_cpu_too() -> None:
    plain, x = DenseLinear(torch.randn(24, 40).bfloat16()), torch.randn(3, 40).bfloat16()
    packed = DenseLinear(ops.pack_weight(plain.weight))
    assert torch.equal(packed(x), plain(x))
    assert [tensor.dim() for tensor in packed.tensors()] == [4]


def test_a_packed_weight_serves_on_the_cpu_too() -> None:
    plain, x = layer(torch.device("cpu"), torch.int8), torch.randn(3, 40).bfloat16()
    packed = replace(plain, weight=ops.pack_weight(plain.weight))
    assert torch.equal(packed(x), plain(x))


@pytest.mark.parametrize("scheme", DTYPES)
def test_the_kernels_of_a_model(scheme: str) -> None:
    found = tiny_llama(scheme=scheme).kernels()
    dtype = {"int8": "int8", "fp8": "e4m3"}[scheme]
    kinds = {variant.kind for variant in found if isinstance(variant, Quantize)}
    assert kinds == {"per_token", "rms_norm", "silu_mul"}
    plain: list[Variant] = [Embed(dtype="fp32"), AppendKV(dtype="fp32"), Sample(dtype="fp32")]
    plain += [L2Probe(), ProcessLogits(), TokenLogprobsKernel()]
    norm, gate = (
        Quantize(kind=kind, in_dtype="fp32", out_dtype="fp32") for kind in ("rms_norm", "silu_mul")
    )
    plain.append(norm)  # of the output projection, which is not quantised
    assert set(plain) <= set(found)
    assert gate not in found
    assert all(variant.dtypes() == {dtype, "fp32"} for variant in found if variant not in plain)
    assert any(variant.family == "gemm_small_m" for variant in found) == (scheme == "int8")
    assert set(tiny_llama(scheme="plain").kernels()) == {*plain, gate}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_16_bit_model_multiplies_by_kernels_alone(dtype: str) -> None:
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    model = tiny_llama(dtype=torch_dtype, head_dim=16)
    for name, kind, linear in model.linears():
        out = "fp32" if name == "lm_head" else dtype
        gemms = [v for v in linear.kernels(kind, torch_dtype) if v.family == "gemm_tiled"]
        assert gemms
        assert {(v.dtype, v.out_dtype) for v in gemms} == {(dtype, out)}, name
    assert not [v for v in tiny_llama().kernels() if v.family == "gemm_tiled"]  # of fp32


def test_logits_of_16_bits_are_fp32() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    logits = sequence_logits(model, [5, 9, 7])
    assert logits.dtype is torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_prompts_and_steps_of_16_bits_have_attention_kernels() -> None:
    found = tiny_llama(dtype=torch.bfloat16, head_dim=16).kernels()
    families = [variant.family for variant in found]
    assert families.count("attention_decode") == families.count("attention_prefill") == 2


def test_nothing_is_compiled_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(required_kernels, "precompile", lambda variants: pytest.fail("compiles"))
    compile_kernels(tiny_llama(scheme="int8"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "lengths", "batch_invariant"),
    # In 16 bits a model's steps have one query a sequence, and its prompts as many as they have:
    # few of these, with fixed splits, are for kernels that no step of the engine launches.
    [
        (torch.float32, (1, 9, 30, 100), True),
        (torch.bfloat16, (1, 100), True),
        (torch.bfloat16, (1, 9, 30, 100), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("scheme", [*DTYPES, "plain"])
def test_no_kernel_is_launched_that_was_not_foreseen(
    scheme: str,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    batch_invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: set[Variant] = set()

    def load(variant: Any, *, device: int, stream: int) -> Any:
        launched.add(variant)
        return loader.load(variant, device=device, stream=stream)

    gemms = (dense_gemm, w8a8_gemm)
    for module in (append_kv_cuda, decode_cuda, embed_module, *gemms, prefill_cuda, quantize_cuda):
        monkeypatch.setattr(module, "load", load)
    model = tiny_llama("cuda", scheme, dtype=dtype, head_dim=16)
    model.batch_invariant = batch_invariant
    compile_kernels(model)
    for length in lengths:
        assert sequence_logits(model, [5] * length).isfinite().all()
    assert launched
    assert launched <= set(model.kernels())


@pytest.mark.gpu
def test_a_checkpoint_gives_the_logits_of_the_cpu() -> None:
    tokens = [7, 30, 2, 99, 14, 3, 3, 8, 200, 41, 6, 5, 77, 12, 90, 1, 250, 31]
    cpu, cuda = (
        sequence_logits(load_model(TINY, device=device), tokens).cpu() for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(cuda, cpu, rtol=0.05, atol=0.05 * float(cpu.abs().max()))
