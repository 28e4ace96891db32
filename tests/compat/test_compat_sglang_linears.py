"""Products of SGLang's linear methods by our kernels, with SGLang's own layers and methods."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from safetensors.torch import save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.environ import envs
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w8a8_fp8,
    compressed_tensors_w8a8_int8,
)
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_exporter import WeightExporter
from sglang.srt.model_loader import loader
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils import offloader

from ostinato.compat import sglang as plugin
from ostinato.compat.sglang import linears
from ostinato.models import BlockFP8Linear

plugin.register()
HookRegistry.apply_hooks()


@pytest.fixture(autouse=True)
def _kernels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our products run on torch's operators here, for which SGLang's would be left alone."""
    monkeypatch.setattr(linears, "has_kernel", lambda *_: True)


INT8, E4M3 = torch.int8, torch.float8_e4m3fn
N, K = 256, 384
WIDTHS = [128, 64, 64]  # of the weights that a layer joins
BF16 = torch.bfloat16


def fill(layer: Any) -> torch.Tensor:
    """Give a layer codes and scales, and return what they stand for, [N, K] fp32."""
    weight = layer.weight.data
    if weight.dtype is INT8:
        weight.random_(-127, 128)
    else:
        weight.copy_((torch.randn(weight.shape) * 40).to(E4M3))
    scale = getattr(layer, "weight_scale_inv", None)
    scale = (layer.weight_scale if scale is None else scale).data
    scale.uniform_(0.002, 0.004)
    if scale.numel() == N:
        return weight.float() * scale.view(N, 1)
    if scale.ndim == 1:
        rows = torch.cat([s.expand(n) for s, n in zip(scale, layer.logical_widths, strict=True)])
        return weight.float() * rows[:, None]
    blocks = scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return weight.float() * blocks


def error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    exact = x.double() @ weight.double().T
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "config",
    [
        W8A8Int8Config({}),
        W8A8Fp8Config(is_checkpoint_fp8_serialized=True),
        Fp8Config(is_checkpoint_fp8_serialized=True),
        Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128]),
    ],
    ids=["w8a8_int8", "w8a8_fp8", "fp8", "fp8_blocks"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_sglang_multiply_by_our_products(config: Any, bias: bool) -> None:
    layer = ReplicatedLinear(
        K, N, bias=bias, params_dtype=BF16, quant_config=config, prefix="model.layers.0.mlp.up"
    )
    weight = fill(layer)
    if bias:
        layer.bias.data.normal_()
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(2, 3, K).to(BF16)
    y, _ = layer(x)
    assert y.shape == (2, 3, N)
    assert y.dtype is BF16
    if bias:
        y = y - layer.bias
    assert error(y.flatten(0, 1), x.flatten(0, 1), weight) < 0.04
    assert layer.weight is None, "the weight is held twice"
    held = sum(x.nbytes for x in layer.ostinato_linear.tensors())
    assert held < 1.1 * N * K
    again, _ = layer(x)
    assert torch.equal(again - layer.bias if bias else again, y)


def of_scheme(scheme: Any) -> Any:
    """Return a layer of three joined weights that a scheme of compressed-tensors has made."""
    layer: Any = torch.nn.Module()
    layer.params_dtype = BF16
    scheme.create_weights(
        layer=layer,
        output_partition_sizes=WIDTHS,
        input_size_per_partition=K,
        input_size=K,
        output_size=N,
        params_dtype=BF16,
        weight_loader=lambda *_: None,
    )
    return layer


def int8_scheme(strategy: str, *, static: bool, symmetric: bool) -> Any:
    strategy = QuantizationStrategy(strategy)
    return compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8(strategy, static, symmetric)


def fp8_scheme(strategy: str, *, static: bool = False) -> Any:
    arguments = QuantizationArgs(num_bits=8, type="float", strategy=strategy)
    return compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8(arguments, static)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "zero_points", "static_zero_points", "fp8"])
def test_schemes_of_compressed_tensors(kind: str, strategy: str) -> None:
    """What SGLang itself drops of a scheme counts here: static scales and zero points."""
    if kind == "fp8":
        scheme = fp8_scheme(strategy, static=strategy == "tensor")
    else:
        scheme = int8_scheme(
            strategy, static=kind.startswith("static"), symmetric="zero_points" not in kind
        )
    layer = of_scheme(scheme)
    weight = fill(layer)
    x = torch.randn(4, K).to(BF16)
    if scheme.is_static_input_scheme:
        limit = 448 if kind == "fp8" else 127
        layer.input_scale.data.fill_(3.5 / limit)
        if kind == "static_zero_points":
            layer.input_zero_point.data.fill_(-40)
            layer.input_scale.data.fill_(4.5 / 127)
    scheme.process_weights_after_loading(layer)
    y = scheme.apply_weights(layer, x, None)
    assert error(y, x, weight) < 0.05
    if kind == "static":  # what is beyond the range of the scale saturates
        far = torch.full((1, K), 100.0, dtype=BF16)
        saturated = scheme.apply_weights(layer, far, None).float()
        torch.testing.assert_close(saturated, 3.5 * weight.sum(1)[None], rtol=0.01, atol=0.05)
    if kind == "zero_points":  # all codes serve positive numbers
        x = x.abs()
        y = scheme.apply_weights(layer, x, None)
        symmetric = int8_scheme(strategy, static=False, symmetric=True)
        other = of_scheme(symmetric)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            other_weight = fill(other)
        symmetric.process_weights_after_loading(other)
        without = error(symmetric.apply_weights(other, x, None), x, other_weight)
        assert error(y, x, weight) < 0.8 * without


def int8_layer() -> Any:
    """Return a layer with codes and scales that are not prepared yet."""
    layer = ReplicatedLinear(
        K, N, bias=False, params_dtype=BF16, quant_config=W8A8Int8Config({}), prefix="x"
    )
    fill(layer)
    return layer


def test_other_weights_for_a_running_server_are_refused() -> None:
    layer = int8_layer()
    model = torch.nn.Sequential(layer)
    refused = weight_updater._unsupported_derived_weight_cache_error
    assert refused(model) is None
    layer.quant_method.process_weights_after_loading(layer)
    reason = refused(model)
    assert reason is not None
    assert reason.startswith("Weights can not be exchanged: 8-bit linear layers hold them")
    with pytest.raises(RuntimeError, match="weights: got others for a running server"):
        layer.quant_method.process_weights_after_loading(layer)


def model_of(layer: Any) -> torch.nn.Module:
    return torch.nn.ModuleDict({"mlp": layer, "norm": torch.nn.LayerNorm(8)})


def test_weights_that_we_hold_are_not_exported(tmp_path: Path) -> None:
    """SGLang would save a checkpoint without them."""
    layer = int8_layer()
    layer.quant_method.process_weights_after_loading(layer)
    exporter = WeightExporter(
        tp_rank=0,
        tp_size=1,
        gpu_id=0,
        get_model_path=lambda: "x",
        get_model=lambda: model_of(layer),
    )
    with pytest.raises(RuntimeError, match="Weights can not be exported: 8-bit linear layers hold"):
        exporter.save_sharded_model(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_sharded_weights_are_read_into_layers_of_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader prepares layers before it has read their weights."""
    monkeypatch.setattr(loader, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setattr(loader, "_get_quantization_config", lambda *_: None)
    monkeypatch.setattr(loader, "post_load_weights", lambda _: None)
    layer = int8_layer()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(linears, "has_kernel", lambda *_: False)
        layer.quant_method.process_weights_after_loading(layer)
    want = {name: x.contiguous() for name, x in model_of(layer).state_dict().items()}
    save_file(want, tmp_path / "model-rank-0-part-0.safetensors")
    made = model_of(int8_layer())
    monkeypatch.setattr(loader, "_initialize_model", lambda *_: made)
    loaded = loader.ShardedStateLoader(LoadConfig(load_format="sharded_state")).load_model(
        model_config=SimpleNamespace(model_path=str(tmp_path), revision=None, dtype=BF16),
        device_config=SimpleNamespace(device="cpu"),
    )
    assert not hasattr(made["mlp"], "ostinato_linear")
    found = loaded.state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], x) for name, x in want.items())
    # Any other loader's layers are ours again.
    layer = int8_layer()
    layer.quant_method.process_weights_after_loading(layer)
    assert hasattr(layer, "ostinato_linear")


@pytest.mark.parametrize(
    ("prefix", "exchanged", "once", "ours"),
    [
        ("layers.0.self_attn.q_b_proj", True, False, False),
        ("layers.0.self_attn.q_proj", True, False, False),
        ("layers.0.self_attn.o_proj", True, True, True),
        ("layers.0.self_attn.q_b_proj", False, True, True),
        ("layers.0.mlp.shared_experts.gate_up_proj", True, True, False),
        ("layers.0.mlp.shared_experts.gate_up_proj", False, False, True),
    ],
)
def test_weights_that_sglang_reads_itself_are_left(
    prefix: str, exchanged: bool, once: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = SimpleNamespace(dcp_enabled=exchanged, dcp_replicate_q_proj=True)
    monkeypatch.setattr(linears, "get_parallel", lambda: parallel)
    layer = int8_layer()
    layer.prefix = prefix
    with envs.SGLANG_OPT_MOE_QUANT_ONCE.override(once):
        assert linears._is_ours(layer) == ours


def test_devices_without_our_kernels_stay_with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "has_kernel", lambda *_: False)
    layer = int8_layer()
    assert not linears._is_ours(layer)


def test_weights_that_sglang_offloads_stay_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "_instance", offloader.OffloaderV1(cpu_offload_max_bytes=1))
    assert not linears._is_ours(int8_layer())


def test_what_is_not_in_8_bits_is_left_to_sglang() -> None:
    plain = ReplicatedLinear(K, N, bias=False, params_dtype=BF16, quant_config=None, prefix="x")
    assert isinstance(plain.quant_method, UnquantizedLinearMethod)
    plain.weight.data.normal_()
    x = torch.randn(2, K).to(BF16)
    assert torch.equal(plain(x)[0], torch.nn.functional.linear(x, plain.weight))


def test_weights_that_a_model_reads_itself_are_left() -> None:
    """SGLang's MLA takes the weight of `kv_b_proj` apart; a stand-in shows who was called."""
    calls: list[Any] = []
    layer = SimpleNamespace(weight=torch.zeros(N, K, dtype=INT8), prefix="layers.0.kv_b_proj")
    prepare = next(
        hook
        for target, hooks in HookRegistry._hooks.items()
        for _, hook, _ in hooks
        if target.endswith("W8A8Int8LinearMethod.process_weights_after_loading")
    )
    prepare(lambda *given: calls.append(given), "method", layer)
    assert calls == [("method", layer)]
    assert layer.weight is not None


def test_other_blocks_and_scales_are_not_taken_for_ours() -> None:
    config = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
    layer = ReplicatedLinear(K, N, bias=False, params_dtype=BF16, quant_config=config, prefix="x")
    fill(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert isinstance(layer.ostinato_linear, BlockFP8Linear)
    scheme = int8_scheme("tensor", static=False, symmetric=True)
    wrong = of_scheme(scheme)
    fill(wrong)
    wrong.logical_widths = [128, 128]
    with pytest.raises(ValueError, match=r"weight_scale: got \[3\] for weights of \[128, 128\]"):
        scheme.process_weights_after_loading(wrong)


def test_activations_that_are_quantised_already_are_refused() -> None:
    layer = int8_layer()
    layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(TypeError, match="x: got tuple, activations that are quantised already"):
        layer.quant_method.apply(layer, (torch.zeros(1, K), torch.ones(1)))
