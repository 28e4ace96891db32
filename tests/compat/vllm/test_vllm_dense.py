"""16-bit linear layers of vLLM by `--quantization ostinato`, and norms by our IR provider."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import ir
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.platforms import current_platform
from vllm_layers import BF16, relative_error

from ostinato import ops
from ostinato.compat.vllm.dense import OstinatoConfig, OstinatoLinearMethod

pytestmark = pytest.mark.usefixtures("hopper")


def linear_of(n: int, k: int, *, bias: bool = True, prefix: str = "a") -> Any:
    """Return vLLM's own layer under our option, loaded with random weights."""
    layer: Any = ColumnParallelLinear(
        k, n, bias=bias, params_dtype=BF16, quant_config=OstinatoConfig(), prefix=prefix
    )
    for parameter in layer.parameters():
        parameter.data.normal_()
    layer.dense = layer.weight.data.clone()
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(0,), (1,), (5,), (2, 3)])
def test_layers_of_vllm_multiply_by_our_op(rows: tuple[int, ...], bias: bool) -> None:
    layer = linear_of(40, 72, bias=bias)
    assert isinstance(layer.quant_method, OstinatoLinearMethod)
    assert layer.weight.dim() == 4
    x = torch.randn(*rows, 72).to(BF16)
    out, _ = layer(x)
    assert out.shape == (*rows, 40)
    if x.numel():
        expected = torch.nn.functional.linear(x, layer.dense, layer.bias)
        assert relative_error(out, expected) < 0.005


def test_layers_in_fp32_stay_with_vllm() -> None:
    """Such as the heads of classifiers and reward models."""
    layer: Any = ReplicatedLinear(
        24, 3, bias=False, params_dtype=torch.float32, quant_config=OstinatoConfig(), prefix="score"
    )
    layer.weight.data.normal_()
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(5, 24)
    assert torch.equal(layer(x)[0], torch.nn.functional.linear(x, layer.weight))


def test_parts_are_loaded_one_by_one() -> None:
    layer: Any = MergedColumnParallelLinear(
        32, [16, 24], bias=False, params_dtype=BF16, quant_config=OstinatoConfig(), prefix="a"
    )
    parts = [torch.randn(n, 32).to(BF16) for n in (16, 24)]
    for index, part in enumerate(parts):
        layer.weight.weight_loader(layer.weight, part, index)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(ops.PackedWeight(layer.weight.data, 40, 32).unpack(), torch.cat(parts))


def test_mla_reads_weights_in_rows_and_others_by_a_product() -> None:
    for prefix in ("a.kv_b_proj", "a.q_proj"):
        layer = linear_of(48, 32, bias=False, prefix=prefix)
        read = get_and_maybe_dequant_weights(layer, out_dtype=BF16)
        assert torch.equal(read, layer.dense)


def test_what_is_no_linear_layer_stays_with_vllm() -> None:
    assert OstinatoConfig().get_quant_method(torch.nn.Embedding(2, 3), "a") is None


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: None)
    with pytest.raises(ValueError, match="quantization: ostinato needs a CUDA GPU"):
        linear_of(16, 16)


def test_a_quantised_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got ostinato for a checkpoint of 'fp8'"):
        OstinatoConfig.from_config({"quant_method": "fp8"})


def test_a_compiled_layer_is_one_graph() -> None:
    layer = linear_of(40, 72)
    x = torch.randn(5, 72).to(BF16)

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x * 2)[0]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 48)])
def test_norms_by_our_provider_equal_the_native_ones(shape: tuple[int, ...]) -> None:
    norm: Any = RMSNorm(48, eps=1e-5, dtype=BF16)
    norm.weight.data.normal_()
    x, residual = (torch.randn(shape).to(BF16) for _ in range(2))
    expected = norm.forward_native(x.clone()), norm.forward_native(x.clone(), residual.clone())
    with (
        ir.ops.rms_norm.set_priority(["ostinato", "native"]),
        ir.ops.fused_add_rms_norm.set_priority(["ostinato", "native"]),
    ):
        assert ir.ops.rms_norm.dispatch(x, norm.weight, 1e-5).provider == "ostinato"
        got = norm.forward_native(x.clone()), norm.forward_native(x.clone(), residual.clone())
    assert relative_error(got[0], expected[0]) < 0.005
    assert relative_error(got[1][0], expected[1][0]) < 0.005
    assert torch.equal(got[1][1], expected[1][1])


def test_norms_that_the_op_has_not_are_native() -> None:
    x, weight = torch.randn(2, 3, 8).to(BF16)[0], torch.ones(8, dtype=BF16)
    with ir.ops.rms_norm.set_priority(["ostinato", "native"]):
        dispatch = ir.ops.rms_norm.dispatch
        assert dispatch(x, None, 1e-5).provider == "native"
        assert dispatch(x, weight, 1e-5, 4).provider == "native"
        assert dispatch(x.t().contiguous().t(), weight, 1e-5).provider == "native"
