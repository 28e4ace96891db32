"""Linear layers that make their own 8-bit activations: the bits of the ops they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_cases import E4M3, assert_same_bits, quantized_randn

from ostinato import ops
from ostinato.jit import loader
from ostinato.jit.variant import Variant
from ostinato.ops.common.pdl import pdl
from ostinato.ops.linear import fused_cuda, precompile, quantize_cuda, w8a8_gemm
from ostinato.ops.linear.fused_cuda import FusedLinear

BF16 = torch.bfloat16
DTYPES = (torch.int8, E4M3)
pytestmark = pytest.mark.usefixtures("kernels")


class Layer:
    """Random operands of a layer, and both ways to compute it."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        n: int,
        k: int,
        m: int,
        dense: torch.dtype,
        norm: torch.dtype | None = None,
    ) -> None:
        self.x, self.residual = (torch.randn(m, k).to(dense).to(device) for _ in range(2))
        self.norm = (torch.rand(k) + 0.5).to(norm or dense).to(device)
        plain = quantized_randn((n, k), dtype).to(device)
        self.w = ops.pack_weight(plain) if device.type == "cuda" else plain
        self.w_scale = torch.rand(n, device=device) / 64 + 0.01
        self.bias = torch.randn(n).to(dense).to(device)

    def product(self, codes: torch.Tensor, scale: torch.Tensor, **how: Any) -> torch.Tensor:
        return ops.w8a8_linear(codes, self.w, scale, self.w_scale, **how)

    def apart(self, *, residual: bool, **how: Any) -> tuple[torch.Tensor, ...]:
        codes, scale, *total = ops.rms_norm_quantize(
            self.x, self.norm, 1e-5, self.w.dtype, residual=self.residual if residual else None
        )
        return (self.product(codes, scale, **how), *total)

    def together(self, *, residual: bool, **how: Any) -> tuple[torch.Tensor, ...]:
        return ops.rms_norm_w8a8_linear(
            *(self.x, self.norm, 1e-5, self.w, self.w_scale),
            residual=self.residual if residual else None,
            **how,
        )


def check(layer: Layer, **how: Any) -> None:
    for residual in (False, True):
        got, want = (way(residual=residual, **how) for way in (layer.together, layer.apart))
        assert len(got) == len(want) == 1 + residual
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)
    codes, scale = ops.quantize_per_token(layer.x, layer.w.dtype)
    got_plain = ops.dynamic_w8a8_linear(layer.x, layer.w, layer.w_scale, **how)
    assert_same_bits(got_plain, layer.product(codes, scale, **how))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [16, 40, 2048, 4096])
@pytest.mark.parametrize("m", [0, 1, 2, 3])
def test_the_bits_are_those_of_the_ops_apart(
    device: torch.device, dtype: torch.dtype, k: int, m: int
) -> None:
    layer = Layer(device, dtype, 70, k, m, BF16)
    check(layer, out_dtype=BF16)
    check(layer, bias=layer.bias, out_dtype=BF16)
    check(layer, batch_invariant=True)


@pytest.mark.parametrize(
    ("dense", "k"), [(BF16, 8192), (torch.float16, 4096), (torch.float16, 4112)]
)
def test_long_rows_and_fp16(device: torch.device, dense: torch.dtype, k: int) -> None:
    layer = Layer(device, torch.int8, 70, k, 1, dense)
    check(layer, bias=layer.bias, out_dtype=dense)


@pytest.mark.parametrize("dense", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [2048, 4112, 8192])
@pytest.mark.parametrize("m", [1, 2])
def test_norm_weights_of_fp32(device: torch.device, dense: torch.dtype, k: int, m: int) -> None:
    layer = Layer(device, torch.int8, 70, k, m, dense, torch.float32)
    layer.norm += 1e-4 * torch.randn(k, device=device)  # which 16 bits could not hold
    check(layer, bias=layer.bias, out_dtype=dense)
    check(layer, out_dtype=torch.float32)


def test_the_output_may_take_the_place_of_x(device: torch.device) -> None:
    layer = Layer(device, torch.int8, 2048, 2048, 1, BF16)
    want = ops.dynamic_w8a8_linear(layer.x, layer.w, layer.w_scale)
    assert_same_bits(ops.dynamic_w8a8_linear(layer.x, layer.w, layer.w_scale, out=layer.x), want)


def test_zeros_infinities_and_nan_as_the_ops_apart(device: torch.device) -> None:
    for dtype in DTYPES:
        layer = Layer(device, dtype, 70, 4096, 1, BF16)
        layer.residual.zero_()
        for value in (0.0, 1e-30, torch.inf, torch.nan):
            layer.x.zero_()[0, 5] = value
            check(layer)


def test_results_go_where_they_are_wanted(device: torch.device) -> None:
    layer = Layer(device, torch.int8, 70, 64, 1, BF16)
    out = torch.empty(1, 70, dtype=BF16, device=device)
    assert ops.dynamic_w8a8_linear(layer.x, layer.w, layer.w_scale, out=out) is out
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.zeros(1, 48, dtype=BF16)}, ValueError, r"weight: got shape \[64\]"),
        ({"x": torch.zeros(64)}, ValueError, r"x: got shape \[64\]"),
        ({"weight": torch.zeros(63, dtype=BF16)}, ValueError, "weight: got shape"),
        ({"eps": -1.0}, ValueError, "eps: got -1.0"),
        ({"w": torch.zeros(8, 64)}, TypeError, "w: got"),
        ({"w": torch.zeros(8, 63, dtype=torch.int8)}, ValueError, "w: got shape"),
        ({"w_scale": torch.ones(7)}, ValueError, "w_scale: got shape"),
        ({"bias": torch.ones(7)}, ValueError, "bias: got shape"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype: got"),
        ({"residual": torch.ones(1, 64)}, TypeError, "residual: got"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant: got"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(1, 64, dtype=BF16),
        "weight": torch.zeros(64, dtype=BF16),
        "eps": 1e-5,
        "w": torch.zeros(8, 64, dtype=torch.int8),
        "w_scale": torch.ones(8),
    }
    with pytest.raises(error, match=message):
        ops.rms_norm_w8a8_linear(**{**arguments, **changed})


def test_a_layer_is_compiled_with_the_kernels_that_it_may_launch() -> None:
    def fused(kind: str, k: int, dtype: torch.dtype = BF16, **how: Any) -> list[Variant]:
        found = precompile.layer_kernels(kind, (4096, k), torch.int8, dtype, **how)
        return [variant for variant in found if isinstance(variant, FusedLinear)]

    [norm] = fused("rms_norm", 4096, out_dtype=torch.float32)
    assert norm.name == "fused_linear-rms_norm-bf16-int8-fp32-k4096"
    assert [v.max_k for v in fused("per_token", 4112)] == [8192]
    [wide] = fused("rms_norm_fp32", 5376)
    assert wide.name == "fused_linear-rms_norm-bf16-int8-bf16-k8192-fp32_weight"
    assert FusedLinear.from_name(wide.name) == wide
    assert not fused("rms_norm", 8200) + fused("rms_norm", 9000) + fused("silu_mul", 4096)
    assert not fused("layer_norm", 4096) + fused("layer_norm_fp32", 4096)
    assert not fused("rms_norm", 4096, torch.float32)
    families = {v.family for v in precompile.layer_kernels("rms_norm", (4096, 4096), E4M3, BF16)}
    assert families == {"quantize", "gemm_tiled"}


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("norm", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("m", "dtype", "one"), [(1, torch.int8, True), (2, torch.int8, False), (1, E4M3, False)]
)
def test_one_token_takes_one_launch(
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    dtype: torch.dtype,
    one: bool,
    batch_invariant: bool,
    norm: torch.dtype,
) -> None:
    launched: list[Variant] = []

    def load(variant: Any, *, device: int, stream: int) -> Any:
        launched.append(variant)
        return loader.load(variant, device=device, stream=stream)

    for module in (fused_cuda, w8a8_gemm, quantize_cuda):
        monkeypatch.setattr(module, "load", load)
    layer = Layer(torch.device("cuda"), dtype, 1024, 4096, m, BF16, norm)
    layer.together(residual=True, batch_invariant=batch_invariant)
    ops.dynamic_w8a8_linear(layer.x, layer.w, layer.w_scale, batch_invariant=batch_invariant)
    assert len(launched) == (2 if one else 4)
    assert all(isinstance(variant, FusedLinear) for variant in launched) == one


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_that_are_not_aligned_take_the_other_kernels(dtype: torch.dtype) -> None:
    layer = Layer(torch.device("cuda"), dtype, 70, 2048, 1, BF16)
    storage = torch.randn(1, 2051, device="cuda").to(BF16)
    for first in (0, 1, 3):
        layer.x = storage[:, first : first + 2048]
        check(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chain_of_layers_replays_with_changed_inputs(dtype: torch.dtype) -> None:
    """As a model's: each layer's sum and output are the next one's residual and input."""
    device, k = torch.device("cuda"), 4096
    layers = [Layer(device, dtype, k, k, 1, BF16) for _ in range(12)]
    x, start = torch.empty(1, k, dtype=BF16, device=device), torch.zeros_like(layers[0].x)

    def chain() -> torch.Tensor:
        y, total = x, start
        for layer in layers * 4:
            y, total = ops.rms_norm_w8a8_linear(
                *(y, layer.norm, 1e-5, layer.w, layer.w_scale / 64), residual=total
            )
            y = ops.dynamic_w8a8_linear(y, layer.w, layer.w_scale / 64)
        return torch.cat([y, total])

    x.normal_()
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(20):
        x.normal_()
        with pdl(False):
            want = chain()
        graph.replay()
        assert want.isfinite().all()
        assert_same_bits(got, want)
