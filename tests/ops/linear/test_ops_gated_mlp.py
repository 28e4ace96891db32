"""An MLP behind a norm as one op: the bits of the ops that it stands for."""

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
from ostinato.ops.linear.fused_cuda import ActivatedLinear, FusedLinear

BF16 = torch.bfloat16
DTYPES = (torch.int8, E4M3)
pytestmark = pytest.mark.usefixtures("kernels")


class MLP:
    """Random operands of an MLP, and both ways to compute it."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, int],
        m: int = 1,
        *,
        dense: torch.dtype = BF16,
        norm: torch.dtype | None = None,
        kind: str = "silu_mul",
    ) -> None:
        k, width = sizes
        self.kind, self.dense = kind, dense
        self.x, self.residual = (torch.randn(m, k).to(dense).to(device) for _ in range(2))
        self.norm = (torch.rand(k) + 0.5).to(norm or dense).to(device)
        shapes = ((2 * width, k), (k, width))
        plain = [quantized_randn(shape, dtype).to(device) for shape in shapes]
        self.weights = [ops.pack_weight(w) for w in plain] if device.type == "cuda" else plain
        self.scales = [torch.rand(n, device=device) / 64 + 0.01 for n, _ in shapes]
        self.biases = [torch.randn(n).to(dense).to(device) for n, _ in shapes]

    def apart(self, *, residual: bool = True, bias: bool = False) -> tuple[torch.Tensor, ...]:
        first, second = self.biases if bias else (None, None)
        made, *total = ops.rms_norm_w8a8_linear(
            *(self.x, self.norm, 1e-5, self.weights[0], self.scales[0]),
            residual=self.residual if residual else None,
            bias=first,
            out_dtype=self.dense,
        )
        codes, scale = ops.activation_quantize(made, self.kind, self.weights[1].dtype)
        last = (self.weights[1], scale, self.scales[1])
        return (ops.w8a8_linear(codes, *last, bias=second, out_dtype=self.dense), *total)

    def together(self, *, residual: bool = True, bias: bool = False) -> tuple[torch.Tensor, ...]:
        first, second = self.biases if bias else (None, None)
        return ops.rms_norm_w8a8_mlp(
            *(self.x, self.norm, 1e-5, self.weights[0], self.scales[0]),
            *(self.weights[1], self.scales[1], self.kind),
            residual=self.residual if residual else None,
            gate_up_bias=first,
            down_bias=second,
            out_dtype=self.dense,
        )

    def check(self) -> None:
        for how in ({"residual": False}, {"bias": True}, {}):
            got, want = self.together(**how), self.apart(**how)
            assert len(got) == len(want) == 1 + how.get("residual", True)
            for one, other in zip(got, want, strict=True):
                assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [(16, 16), (64, 48), (2048, 1040), (112, 40)])
def test_the_bits_are_those_of_the_ops_apart(
    device: torch.device, dtype: torch.dtype, m: int, sizes: tuple[int, int]
) -> None:
    MLP(device, dtype, sizes, m).check()


@pytest.mark.parametrize("kind", quantize_cuda.GATED)
def test_every_gate(device: torch.device, kind: str) -> None:
    MLP(device, torch.int8, (256, 1024), kind=kind).check()


@pytest.mark.parametrize("dense", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(device: torch.device, dense: torch.dtype) -> None:
    MLP(device, torch.int8, (256, 1024), dense=dense).check()
    MLP(device, torch.int8, (4112, 80), dense=dense).check()


@pytest.mark.parametrize("kind", ["silu_mul", "gelu_tanh_mul"])
def test_norm_weights_of_fp32(device: torch.device, kind: str) -> None:
    mlp = MLP(device, torch.int8, (512, 80), kind=kind, norm=torch.float32)
    mlp.norm += 1e-4 * torch.randn(512, device=device)  # which 16 bits could not hold
    mlp.check()


@pytest.mark.parametrize("value", [0.0, 1e-30, 300.0, torch.inf, torch.nan])
def test_zeros_large_gates_infinities_and_nan(device: torch.device, value: float) -> None:
    mlp = MLP(device, torch.int8, (256, 512))
    mlp.x.zero_()[0, 5] = value
    mlp.residual.zero_()
    mlp.scales[0] *= 64
    mlp.check()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.zeros(1, 48, dtype=BF16)}, ValueError, r"weight: got shape \[64\]"),
        ({"eps": -1.0}, ValueError, "eps: got -1.0"),
        ({"kind": "silu"}, ValueError, "kind: got 'silu', expected one of silu_mul"),
        ({"gate_up_w": torch.zeros(32, 64)}, TypeError, "gate_up_w: got"),
        ({"gate_up_w_scale": torch.ones(7)}, ValueError, "gate_up_w_scale: got shape"),
        ({"gate_up_bias": torch.ones(7)}, ValueError, "gate_up_bias: got shape"),
        ({"gate_up_w": torch.zeros(33, 64, dtype=torch.int8)}, ValueError, "gate_up_w: got 33"),
        ({"down_w": torch.zeros(8, 17, dtype=torch.int8)}, ValueError, "down_w: got shape"),
        ({"down_w": torch.zeros(8, 16).to(E4M3)}, TypeError, "down_w: got dtype"),
        ({"down_w_scale": torch.ones(7)}, ValueError, "down_w_scale: got shape"),
        ({"down_bias": torch.ones(7)}, ValueError, "down_bias: got shape"),
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
        "gate_up_w": torch.zeros(32, 64, dtype=torch.int8),
        "gate_up_w_scale": torch.ones(1),
        "down_w": torch.zeros(8, 16, dtype=torch.int8),
        "down_w_scale": torch.ones(8),
        "kind": "silu_mul",
    }
    arguments["gate_up_w_scale"] = torch.ones(
        changed.get("gate_up_w", arguments["gate_up_w"]).size(0)
    )
    with pytest.raises(error, match=message):
        ops.rms_norm_w8a8_mlp(**{**arguments, **changed})


def test_a_model_is_compiled_with_both_kernels_of_an_mlp() -> None:
    def kernels(dtype: torch.dtype, then: str, norm: str = "rms_norm") -> set[str]:
        found = precompile.layer_kernels(norm, (2048, 4096), dtype, BF16)
        found += precompile.layer_kernels(then, (4096, 1024), dtype, BF16)
        found += precompile.layer_kernels(norm, (4096, 4096), dtype, BF16, out_dtype=torch.float32)
        found += precompile.gated_kernels(then, found)
        return {v.name for v in found if getattr(v, "activation", "") or v.family.startswith("act")}

    second = "activated_linear-int8-bf16"
    first = "fused_linear-rms_norm-bf16-int8-bf16-k4096"
    assert kernels(torch.int8, "silu_mul") == {f"{first}-then_silu_mul", second}
    wide = f"{first}-fp32_weight-then_gelu_tanh_mul"
    assert kernels(torch.int8, "gelu_tanh_mul", "rms_norm_fp32") == {wide, second}
    assert FusedLinear.from_name(wide).name == wide
    assert ActivatedLinear.from_name(second).name == second
    assert not kernels(E4M3, "silu_mul") | kernels(torch.int8, "relu2")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "dtype", "sizes", "launches"),
    [
        (1, torch.int8, (4096, 1024), 2),
        (1, torch.int8, (4096, 1032), 3),  # no whole tiles: the norm alone is one with its product
        (2, torch.int8, (4096, 1024), 4),
        (1, E4M3, (4096, 1024), 4),
    ],
)
def test_one_token_takes_two_launches(
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    launches: int,
) -> None:
    launched: list[Variant] = []

    def load(variant: Any, *, device: int, stream: int) -> Any:
        launched.append(variant)
        return loader.load(variant, device=device, stream=stream)

    for module in (fused_cuda, w8a8_gemm, quantize_cuda):
        monkeypatch.setattr(module, "load", load)
    MLP(torch.device("cuda"), dtype, sizes, m).together()
    assert len(launched) == launches
    assert isinstance(launched[-1], ActivatedLinear) == (launches == 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(4096, 12288), (4096, 14336), (5120, 17920), (5120, 32768), (5376, 21504)], ids=str
)
def test_sizes_of_models(sizes: tuple[int, int]) -> None:
    MLP(torch.device("cuda"), torch.int8, sizes).check()


@pytest.mark.gpu
def test_a_chain_of_mlps_replays_with_changed_inputs() -> None:
    """As a model's: what a launch leaves for the next is where the next layer's will be."""
    device, sizes = torch.device("cuda"), (4096, 14336)
    layers = [MLP(device, torch.int8, sizes) for _ in range(4)]
    x, start = torch.empty_like(layers[0].x), torch.zeros_like(layers[0].x)

    def chain(together: bool) -> torch.Tensor:
        y, total = x, start
        for layer in layers * 8:
            layer.x, layer.residual = y, total
            y, total = layer.together() if together else layer.apart()
            y = y / 1024
        return torch.cat([y, total])

    x.normal_()
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(20):
        x.normal_()
        with pdl(False):
            want = chain(False)
        graph.replay()
        assert want.isfinite().all()
        assert_same_bits(got, want)
