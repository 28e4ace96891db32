"""Layers that vLLM serves itself, and weights that it loads again or brings from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_vllm_attention import Case
from test_vllm_dense import linear_of
from test_vllm_fp8 import loaded
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearKernel, Int8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum
from vllm_batches import HEADS
from vllm_layers import BF16

from ostinato.compat.vllm import dense
from ostinato.compat.vllm.fp8_block_kernel import OstinatoFp8BlockLinearKernel
from ostinato.compat.vllm.fp8_kernel import OstinatoFP8LinearKernel
from ostinato.compat.vllm.int8_kernel import OstinatoInt8LinearKernel

pytestmark = pytest.mark.usefixtures("on_cuda")
TABLES = {
    "fp8": (linear._POSSIBLE_FP8_KERNELS, OstinatoFP8LinearKernel),
    "block": (linear._POSSIBLE_FP8_BLOCK_KERNELS, OstinatoFp8BlockLinearKernel),
    "int8": (linear._POSSIBLE_INT8_KERNELS, OstinatoInt8LinearKernel),
}


class _Theirs:
    """What vLLM's own kernels have in common; it says that it was called."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.processed_by = self

    def apply_weights(self, layer: Any, x: Any, bias: Any = None, **kwargs: Any) -> Any:
        return "theirs"

    def apply_scaled_mm(self, **arguments: Any) -> Any:
        raise NotImplementedError


class _TheirFp8(_Theirs, FP8ScaledMMLinearKernel):  # type: ignore[misc, unused-ignore]
    pass


class _TheirInt8(_Theirs, Int8ScaledMMLinearKernel):  # type: ignore[misc, unused-ignore]
    pass


class _TheirDense(_Theirs):
    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        return "theirs"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind our kernels vLLM has one that needs no binaries."""
    for kind, (table, ours) in TABLES.items():
        other = _TheirInt8 if kind == "int8" else _TheirFp8
        monkeypatch.setitem(table, PlatformEnum.CUDA, [ours, other])


def kernel_of(kind: str, layer: Any, flags: dict[str, Any]) -> Any:
    """Return our kernel once it has processed a layer with these flags of its weight."""
    for name, value in flags.items():
        setattr(layer.weight, name, value)
    if kind == "int8":
        names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
        config = linear.Int8ScaledMMLinearLayerConfig(True, False, True)
        kernel = OstinatoInt8LinearKernel(config, names)
    else:
        kernel = loaded("block" if kind == "block" else "channel").scheme.fp8_linear
    kernel.process_weights_after_loading(layer)
    return kernel


def raw_layer() -> Any:
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(128, 128, dtype=torch.int8), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.ones(1, 1), requires_grad=False)
    layer._input_quant_key = "ours"
    return layer


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.usefixtures("theirs")
def test_weights_on_the_host_stay_there_with_their_kernel(kind: str) -> None:
    layer = raw_layer()
    weight = layer.weight
    kernel = kernel_of(kind, layer, {"_vllm_is_uva_offloaded": True})
    assert layer.processed_by is kernel.theirs
    assert layer.weight is weight
    assert weight.shape == (128, 128)
    assert layer._input_quant_key is None
    assert kernel.apply_weights(layer, torch.zeros(1, 128)) == "theirs"


@pytest.mark.usefixtures("theirs")
def test_products_that_vllm_makes_itself_are_left_to_it() -> None:
    layer = raw_layer()
    layer.is_bmm = True
    kernel = kernel_of("block", layer, {})
    assert layer.processed_by is kernel.theirs
    assert layer.weight.dim() == 2


def test_16_bit_weights_on_the_host_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "UnquantizedLinearMethod", _TheirDense)
    layer = linear_of(40, 72)
    layer.weight.data = layer.dense.clone()
    layer.weight._vllm_is_uva_offloaded = True
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.processed_by is layer.quant_method.theirs
    assert layer.weight.shape == (40, 72)
    assert layer.quant_method.apply(layer, torch.randn(3, 72).to(BF16)) == "theirs"


def test_block_scales_keep_their_place_when_loaded_again() -> None:
    """A captured graph reads them where they were."""
    layer = loaded("block")
    first = layer.ostinato_scales
    assert "ostinato_scales" in dict(layer.named_parameters())
    again = loaded("block")
    layer.weight.data, layer.weight_scale.data = (
        torch.zeros(layer.dense.shape, dtype=torch.float8_e4m3fn),
        again.weight_scale.data.clone(),
    )
    layer.scheme.fp8_linear.process_weights_after_loading(layer)
    assert layer.ostinato_scales is first
    assert torch.equal(first, again.ostinato_scales)


@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_weights_that_another_process_has_packed_are_read(strategy: str) -> None:
    layer = loaded(strategy)
    x = torch.randn(3, layer.dense.size(1)).to(BF16)
    expected = layer.scheme.apply_weights(layer, x, None)
    del layer.ostinato_shape
    assert torch.equal(layer.scheme.apply_weights(layer, x, None), expected)


def test_sinks_keep_their_place_when_loaded_again() -> None:
    sinks = torch.randn(HEADS).to(BF16)
    impl = Case([(1, 3)], torch.device("cpu"), sinks=sinks).impl
    first = impl.sinks
    assert first is not None
    sinks.copy_(torch.arange(HEADS))
    impl.process_weights_after_loading(BF16)
    assert impl.sinks is first
    assert torch.equal(first, torch.arange(HEADS).float())
