"""INT8 layers of vLLM's compressed-tensors scheme on our kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)
from vllm_layers import BF16, bare_layer, create_weights, fill, relative_error, silu_and_mul

from ostinato import ops
from ostinato.compat.vllm.int8_kernel import OstinatoInt8LinearKernel

pytestmark = pytest.mark.usefixtures("on_cuda")
PARTS, K = [32, 16, 24], 80


def loaded(strategy: str = "channel", *, static: bool = False, symmetric: bool = True) -> Any:
    """Return a loaded layer with its scheme, and its weight in fp32 as `dense`."""
    scheme = CompressedTensorsW8A8Int8(strategy, static, symmetric)
    layer = bare_layer(PARTS, K)
    create_weights(scheme, layer)
    codes = fill(layer.weight, torch.randint(-127, 128, (sum(PARTS), K), dtype=torch.int8))
    if strategy == "channel":
        scale = fill(layer.weight_scale, torch.rand(sum(PARTS), 1) / 100 + 0.01)
    else:
        scale = fill(layer.weight_scale, torch.tensor([0.01, 0.02, 0.03]))
        scale = scale.repeat_interleave(torch.tensor(PARTS)).unsqueeze(1)
    if static:
        fill(layer.input_scale, torch.tensor([0.04]))
        if not symmetric:
            fill(layer.input_zero_point, torch.tensor([7], dtype=torch.int8))
    layer.dense = codes.float() * scale
    scheme.process_weights_after_loading(layer)
    layer.scheme = scheme
    return layer


def test_our_kernel_is_chosen_before_cutlass() -> None:
    kernel = linear.init_int8_linear_kernel(True, False, True, "test")
    assert type(kernel) is OstinatoInt8LinearKernel


def test_a_disabled_kernel_leaves_the_layer_to_cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "OstinatoInt8LinearKernel")
    kernel = linear.init_int8_linear_kernel(True, False, True, "test")
    assert type(kernel).__name__ == "CutlassInt8ScaledMMLinearKernel"


def test_another_gpu_leaves_the_layer_to_cutlass() -> None:
    assert OstinatoInt8LinearKernel.is_supported(80) == (
        False,
        "has no kernels for compute capability 8.0",
    )


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows", [(0,), (1,), (5,), (2, 3)])
def test_results_equal_the_dequantised_layer(
    strategy: str, static: bool, symmetric: bool, rows: tuple[int, ...]
) -> None:
    layer = loaded(strategy, static=static, symmetric=symmetric)
    x = (torch.randn(*rows, K) + 0.5).to(BF16)
    bias = torch.randn(sum(PARTS)).to(BF16)
    out = layer.scheme.apply_weights(layer, x, bias)
    assert out.shape == (*rows, sum(PARTS))
    assert out.dtype is BF16
    if x.numel():
        expected = x.float() @ layer.dense.t() + bias.float()
        assert relative_error(out, expected) < 0.02


def test_weights_are_held_once_and_packed() -> None:
    layer = loaded()
    held = [p for p in layer.parameters() if p.dtype is torch.int8]
    assert [p.dim() for p in held] == [4]
    w = ops.PackedWeight(layer.weight.data, sum(PARTS), K)
    assert torch.equal(w.unpack().float() * layer.weight_scale.view(-1, 1), layer.dense)


def test_static_ranges_of_two_parts_are_joined() -> None:
    from ostinato.compat.vllm.int8_kernel import _one_range

    scale, zero = _one_range(torch.tensor([0.02, 0.01]), torch.tensor([0, -100]))
    assert zero is not None
    low, high = float((-128 - zero) * scale), float((127 - zero) * scale)
    assert low == pytest.approx(-128 * 0.02, abs=0.02)
    assert high == pytest.approx(127 * 0.02, abs=0.02)
    joint, none = _one_range(torch.tensor([0.02, 0.05]), None)
    assert (joint.tolist(), none) == (pytest.approx([0.05]), None)


@pytest.mark.parametrize("rows", [(3,), (2, 3)])
def test_gate_is_fused_with_the_quantisation_for_the_layer(rows: tuple[int, ...]) -> None:
    layer = loaded()
    x = torch.randn(*rows, 2 * K).to(BF16)
    codes = maybe_fused_act_quant(silu_and_mul(), x, layer)
    assert isinstance(codes, QuantizedActivation)
    assert codes.data.dtype is torch.int8
    out = layer.scheme.apply_weights(layer, codes, None)
    gate, up = x.float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up) @ layer.dense.t()
    assert out.dtype is BF16
    assert relative_error(out, expected) < 0.02


@pytest.mark.parametrize("how", [{"static": True}, {"symmetric": False}])
def test_gate_is_not_fused_where_scales_are_others(how: dict[str, bool]) -> None:
    layer = loaded(**how)
    x = torch.randn(3, 2 * K).to(BF16)
    assert not isinstance(maybe_fused_act_quant(silu_and_mul(), x, layer), QuantizedActivation)


def test_weights_that_were_not_prepared_are_told() -> None:
    """vLLM's tensorizer loads parameters as they were saved, and prepares none."""
    scheme, layer = CompressedTensorsW8A8Int8("channel", False, True), bare_layer([32], 64)
    create_weights(scheme, layer)
    with pytest.raises(RuntimeError, match="weight: got one that vLLM has not prepared after"):
        scheme.apply_weights(layer, torch.randn(3, 64).to(BF16), None)


def test_compiled_layers_are_one_graph() -> None:
    layer = loaded()
    x = torch.randn(5, K).to(BF16)

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer.scheme.apply_weights(layer, x * 2, None)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))
    assert torch.equal(compiled(x[:3]), step(x[:3]))
