"""FP8 layers of vLLM, by channel, tensor and blocks, on our kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.transform.linear import (
    CompressedTensorsLinearTransformMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kFp8StaticTokenSym,
)
from vllm_layers import BF16, E4M3, bare_layer, create_weights, fill, relative_error, silu_and_mul

from ostinato.compat.vllm.fp8_block_kernel import OstinatoFp8BlockLinearKernel
from ostinato.compat.vllm.fp8_kernel import OstinatoFP8LinearKernel

pytestmark = pytest.mark.usefixtures("on_cuda")
PARTS, K = [32, 16, 24], 80
BLOCK_PARTS, BLOCK_K = [256, 128, 128], 384


def scheme_of(strategy: str, *, static: bool) -> CompressedTensorsW8A8Fp8:
    """Return vLLM's scheme for e4m3 weights of a strategy."""
    weights = QuantizationArgs(
        num_bits=8,
        type=QuantizationType.FLOAT,
        strategy=QuantizationStrategy(strategy),
        block_structure=[128, 128] if strategy == "block" else None,
    )
    try:
        torch.set_default_dtype(BF16)  # as while vLLM makes a model
        return CompressedTensorsW8A8Fp8(weights, static)
    finally:
        torch.set_default_dtype(torch.float32)


def loaded(strategy: str, *, static: bool = False, prefix: str | None = None) -> Any:
    """Return a loaded layer with its scheme, and its weight in fp32 as `dense`."""
    parts, k = (BLOCK_PARTS, BLOCK_K) if strategy == "block" else (PARTS, K)
    scheme, layer, n = scheme_of(strategy, static=static), bare_layer(parts, k), sum(parts)
    layer.prefix = prefix or layer.prefix
    create_weights(scheme, layer)
    codes = fill(layer.weight, (torch.randn(n, k) * 40).to(E4M3))
    if strategy == "channel":
        scale = fill(layer.weight_scale, torch.rand(n, 1) / 100 + 0.01)
    elif strategy == "tensor":
        # A checkpoint that has the parts as one. Of several parts vLLM makes one by its binaries.
        scale = fill(layer.weight_scale[:1], torch.tensor([0.01]))
    else:
        blocks = fill(layer.weight_scale, torch.rand(n // 128, k // 128) / 100 + 0.01)
        scale = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    if static:
        fill(layer.input_scale, torch.tensor([0.02, 0.03, 0.025]))
    layer.dense = codes.float() * scale
    scheme.process_weights_after_loading(layer)
    layer.scheme = scheme
    return layer


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_our_kernels_are_chosen_before_cutlass(strategy: str) -> None:
    expected = OstinatoFp8BlockLinearKernel if strategy == "block" else OstinatoFP8LinearKernel
    assert type(loaded(strategy).scheme.fp8_linear) is expected


@pytest.mark.parametrize(
    ("strategy", "static"),
    [("channel", False), ("channel", True), ("tensor", False), ("tensor", True), ("block", False)],
)
@pytest.mark.parametrize("rows", [(0,), (1,), (5,), (2, 3)])
def test_results_equal_the_dequantised_layer(
    strategy: str, static: bool, rows: tuple[int, ...]
) -> None:
    layer = loaded(strategy, static=static)
    n, k = layer.dense.shape
    x, bias = torch.randn(*rows, k).to(BF16), torch.randn(n).to(BF16)
    out = layer.scheme.apply_weights(layer, x, bias)
    assert out.shape == (*rows, n)
    assert out.dtype is BF16
    if x.numel():
        expected = x.float() @ layer.dense.t() + bias.float()
        assert relative_error(out, expected) < 0.04


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_weights_are_held_once_and_packed(strategy: str) -> None:
    layer = loaded(strategy)
    assert [p.dim() for p in layer.parameters() if p.dtype is E4M3] == [4]


@pytest.mark.parametrize("size", [64, 96])
def test_square_weights_that_mla_reads_are_not_turned(size: int) -> None:
    scheme, layer = scheme_of("channel", static=False), bare_layer([size], size)
    layer.prefix = "model.layers.0.self_attn.kv_b_proj"
    create_weights(scheme, layer)
    codes = fill(layer.weight, (torch.randn(size, size) * 40).to(E4M3))
    scale = fill(layer.weight_scale, torch.rand(size, 1) / 100 + 0.01)
    scheme.process_weights_after_loading(layer)
    x = torch.randn(3, size).to(BF16)
    out = scheme.apply_weights(layer, x, None)
    assert relative_error(out, x.float() @ (codes.float() * scale).t()) < 0.04


@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_weights_that_mla_reads_stay_in_rows(strategy: str) -> None:
    layer = loaded(strategy, prefix="model.layers.0.self_attn.kv_b_proj")
    assert layer.weight.dim() == 2
    x = torch.randn(3, layer.dense.size(1)).to(BF16)
    out = layer.scheme.apply_weights(layer, x, None)
    assert relative_error(out, x.float() @ layer.dense.t()) < 0.04


def test_a_bound_of_scales_is_kept() -> None:
    layer = loaded("channel")
    layer.input_scale_ub = torch.tensor([10.0])
    out = layer.scheme.apply_weights(layer, torch.full((2, K), 100.0).to(BF16), None)
    # Activations of 100 saturate at the bound of their largest magnitude.
    expected = 10 * layer.dense.sum(1).expand(2, -1)
    assert relative_error(out, expected) < 0.02


def test_gate_is_not_fused_where_the_input_is_rotated() -> None:
    """Checkpoints with online transforms of compressed-tensors rotate it in 16 bits."""
    layer = loaded("channel")
    inner = CompressedTensorsLinearMethod(None)
    layer.quant_method = CompressedTensorsLinearTransformMethod(inner, {}, {})
    layer.quant_method.input_transform = None
    x = torch.randn(3, 2 * K).to(BF16)
    assert isinstance(maybe_fused_act_quant(silu_and_mul(), x, layer), QuantizedActivation)
    layer.quant_method.input_transform = torch.nn.Identity()
    assert isinstance(maybe_fused_act_quant(silu_and_mul(), x, layer), torch.Tensor)


def test_gate_is_fused_with_the_quantisation_for_the_layer() -> None:
    layer = loaded("channel")
    x = torch.randn(3, 2 * K).to(BF16)
    codes: Any = maybe_fused_act_quant(silu_and_mul(), x, layer)
    assert codes.data.dtype is E4M3
    out = layer.scheme.apply_weights(layer, codes, None)
    gate, up = x.float().chunk(2, dim=1)
    expected = (torch.nn.functional.silu(gate) * up) @ layer.dense.t()
    assert relative_error(out, expected) < 0.04


@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_compiled_layers_are_one_graph(strategy: str) -> None:
    layer = loaded(strategy)
    x = torch.randn(5, layer.dense.size(1)).to(BF16)

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer.scheme.apply_weights(layer, x * 2, None)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))


def test_batch_invariance_is_what_vllm_believes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    kernel = loaded("channel").scheme.fp8_linear
    assert linear.fp8_scaled_mm_is_batch_invariant(kernel)
    assert kernel.batch_invariant


def config(activations: Any, weights: Any) -> linear.FP8ScaledMMLinearLayerConfig:
    return linear.FP8ScaledMMLinearLayerConfig(weights, activations, (64, 64), BF16, BF16)


def test_other_scales_are_left_to_vllm() -> None:
    able, reason = OstinatoFP8LinearKernel.can_implement(
        config(kFp8DynamicTensorSym, kFp8StaticTensorSym)
    )
    assert not able
    assert reason is not None
    assert "dynamic,per_tensor" in reason
    blocks = create_fp8_quant_key(static=True, group_shape=GroupShape(128, 128))
    assert not OstinatoFP8LinearKernel.can_implement(config(kFp8DynamicTokenSym, blocks))[0]
    narrow = create_fp8_quant_key(static=False, group_shape=GroupShape(1, 64))
    assert not OstinatoFp8BlockLinearKernel.can_implement(config(narrow, blocks))[0]


@pytest.mark.parametrize("weights", [kFp8StaticChannelSym, kFp8StaticTokenSym], ids=str)
def test_scales_by_row_are_ours_whatever_they_are_called(weights: Any) -> None:
    """ModelOpt and FBGEMM call those of a weight's rows scales by token."""
    assert OstinatoFP8LinearKernel.can_implement(config(kFp8DynamicTokenSym, weights))[0]
