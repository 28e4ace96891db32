"""Blocks of experts in CUDA graphs: one graph serves every routing, with the eager bits."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from tiny_experts import FAMILIES, tiny_experts

from ostinato.bench.moe.cases import Case, Shape
from ostinato.bench.moe.check import CHECK
from ostinato.bench.moe.inputs import Inputs, random_inputs
from ostinato.bench.shapes import PRECISIONS
from ostinato.jit import loader
from ostinato.jit.variant import Variant
from ostinato.models import compile_kernels, sequence_logits
from ostinato.ops.attention import append_kv_cuda, decode_cuda, prefill_cuda
from ostinato.ops.linear import dense_gemm, quantize_cuda, w8a8_gemm
from ostinato.ops.moe import combine_cuda, moe_linear_cuda, route_cuda

EMBED = import_module("ostinato.ops.embed")  # `ops.embed` is the function
MODULES = (append_kv_cuda, combine_cuda, decode_cuda, dense_gemm, EMBED, moe_linear_cuda)
MODULES += (prefill_cuda, quantize_cuda, route_cuda, w8a8_gemm)
SHAPE = Shape(experts=24, top_k=4, hidden=208, intermediate=72)
ROUTINGS = 300


def randomly_routed(inputs: Inputs, generator: torch.Generator) -> torch.Tensor:
    """Return tokens that choose at random: all the same, few of them, or any experts."""
    device = inputs.x.device
    x = torch.randn(inputs.x.shape, generator=generator, device=device).bfloat16()
    kind = int(torch.randint(3, (1,), generator=generator, device=device))
    if kind == 0:
        x[:, : SHAPE.experts] = x[0, : SHAPE.experts].clone()
    elif kind == 1:
        x[:, 6 : SHAPE.experts] = -9
    return x


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("m", [1, 7, 64])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_graph_serves_hundreds_of_routings(precision: str, m: int) -> None:
    device = torch.device("cuda")
    one = random_inputs(Case(SHAPE, m, "balanced"), precision, device)[0]
    mixture, n_active = one.weights.mixture, torch.full((1,), m, dtype=torch.int32, device=device)
    mixture(one.x, one.config, n_active)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mixture(one.x, one.config, n_active)
    generator = torch.Generator(device).manual_seed(0)
    changed = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(ROUTINGS):
        one.x.copy_(randomly_routed(one, generator))
        graph.replay()
        changed += (captured != mixture(one.x, one.config, n_active)).sum()
        # The first token by itself, and beside padding that would choose other experts.
        alone = mixture(one.x[:1], one.config)
        changed += (captured[:1] != alone).sum()
        n_active.fill_(1)
        graph.replay()
        changed += (captured[:1] != alone).sum()
        n_active.fill_(m)
    assert int(changed) == 0


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("routing", ["balanced", "skewed", "one"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_are_close_to_fp32(precision: str, routing: str) -> None:
    for m in (1, 9, 33, 300):
        case = Case(SHAPE, m, routing)
        one = random_inputs(case, precision, torch.device("cuda"))[0]
        assert CHECK.wrong(one.weights.mixture(one.x, one.config), case, one) is None


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("precision", ["int8", "fp8-block"])
def test_ten_thousand_replays_change_nothing(precision: str) -> None:
    one = random_inputs(Case(SHAPE, 33, "skewed"), precision, torch.device("cuda"))[0]
    expected = one.weights.mixture(one.x, one.config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one.weights.mixture(one.x, one.config)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        graph.replay()
        changed += (captured != expected).sum()
    assert int(changed) == 0


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("family", "precision"),
    [*((family, "int8") for family in FAMILIES), *(("qwen2_moe", p) for p in PRECISIONS)],
)
def test_no_kernel_is_launched_that_was_not_foreseen(
    family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[Variant] = set()

    def load(variant: Any, *, device: int, stream: int) -> Any:
        launched.add(variant)
        return loader.load(variant, device=device, stream=stream)

    for module in MODULES:
        monkeypatch.setattr(module, "load", load)
    model = tiny_experts(family, precision, "cuda")
    compile_kernels(model)
    # Not a few tokens: these launch what no step does (test_models_required_kernels).
    for length in (1, 100):
        assert sequence_logits(model, [5] * length).isfinite().all()
    assert {"moe_linear", "moe_route", "moe_combine"} <= {variant.family for variant in launched}
    assert launched <= set(model.kernels())
