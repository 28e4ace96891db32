"""The adapter of vLLM's experts: what it calls, with modules of that name that multiply here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_adapters import ADAPTERS
from torch.nn import functional

from ostinato.bench.harness.benchmark import Implementation
from ostinato.bench.harness.peers import load_adapter
from ostinato.bench.harness.runner import time_cases
from ostinato.bench.moe.benchmark import BENCHMARK
from ostinato.bench.moe.cases import Case, Shape
from ostinato.bench.moe.impls import ours

ADAPTER: Any = load_adapter(ADAPTERS / "vllm_moe.py")
PLACE = "vllm.model_executor.layers.fused_moe"
CPU = torch.device("cpu")
CASE = Case(Shape(6, 2, 160, 48), 5, "skewed")
FILES: dict[tuple[object, ...], dict[int, str]] = {}
TILES: list[object] = []


def _plain(w: torch.Tensor, scale: torch.Tensor | None, block: Any) -> torch.Tensor:
    """Return experts' weights in fp32, by the scales that vLLM takes."""
    if scale is None:
        return w.float()
    if block is None:
        assert scale.shape == (*w.shape[:2], 1)
        return w.float() * scale
    wide = scale.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return w.float() * wide[:, : w.size(1), : w.size(2)]


def _fused_experts(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    quant_config: Any,
) -> torch.Tensor:
    config = quant_config or SimpleNamespace(w1=None, w2=None, block=None)
    first, second = _plain(w1, config.w1, config.block), _plain(w2, config.w2, config.block)
    assert topk_ids.dtype is torch.int32
    out = torch.zeros(x.shape)
    for token, slot in ((t, s) for t in range(x.size(0)) for s in range(topk_ids.size(1))):
        expert = int(topk_ids[token, slot])
        gate, up = (first[expert] @ x[token].float()).chunk(2)
        out[token] += topk_weights[token, slot] * (second[expert] @ (functional.silu(gate) * up))
    return out.to(x.dtype)


def _fused_topk(
    x: torch.Tensor, logits: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor, None]:
    assert renormalize
    values, ids = logits.float().softmax(1).topk(topk)
    return values / values.sum(1, keepdim=True), ids.int(), None


def _quant(w1: torch.Tensor, w2: torch.Tensor, *rest: None, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(w1=w1, w2=w2, block=options.get("block_shape"))


@contextmanager
def _override(tiles: object) -> Iterator[None]:
    TILES.append(tiles)
    yield


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have modules of vLLM's names, and none that is remembered."""

    def module(name: str, **found: Any) -> None:
        made = ModuleType(name)
        vars(made).update(found)
        monkeypatch.setitem(sys.modules, name, made)

    FILES.clear()
    TILES.clear()
    module("vllm._custom_ops")
    module(PLACE, override_config=_override)
    module(
        f"{PLACE}.fused_moe",
        fused_experts=_fused_experts,
        get_moe_configs=lambda *sizes: FILES.get(sizes),
    )
    module(f"{PLACE}.router.fused_topk_router", fused_topk=_fused_topk)
    module(f"{PLACE}.config", fp8_w8a8_moe_quant_config=_quant, int8_w8a8_moe_quant_config=_quant)
    ADAPTER._module.cache_clear()
    ADAPTER._route.cache_clear()


def peer(name: str, **environ: str) -> Implementation[Any, Any]:
    (found,) = (one for one in ADAPTER.peers("moe", environ) if one.name == name)
    return found


@pytest.mark.parametrize(
    ("name", "precision"),
    [("vllm_i8", "int8"), ("vllm_f8", "fp8"), ("vllm_blk", "fp8-block"), ("vllm_bf16", "bf16")],
)
@pytest.mark.usefixtures("vllm")
def test_its_experts_are_given_our_weights_and_are_right(name: str, precision: str) -> None:
    impls = [ours(precision), peer(name, OSTINATO_MOE_ROUTING="vllm")]
    (result,) = time_cases(BENCHMARK, [CASE], impls, CPU)
    assert result.failures == result.unsupported == {}
    mine, theirs = result.rows
    assert (mine.peer, theirs.impl) == (name, name)


@pytest.mark.usefixtures("vllm")
def test_tiles_are_of_the_file_for_blocks_nearest_in_tokens() -> None:
    impls = [peer("vllm_f8t", OSTINATO_MOE_ROUTING="vllm")]
    (result,) = time_cases(BENCHMARK, [CASE], impls, CPU)
    assert result.unsupported == {"vllm_f8t": "vLLM has no file for FP8 in blocks"}
    FILES[6, 48, "fp8_w8a8", 128, 128] = {1: "few", 4: "nearest", 64: "many"}
    (result,) = time_cases(BENCHMARK, [CASE], impls, CPU)
    assert [row.impl for row in result.rows] == ["vllm_f8t"]
    assert set(TILES) == {"nearest"}
    FILES[6, 48, "fp8_w8a8"] = {1: "its own"}
    (result,) = time_cases(BENCHMARK, [CASE], impls, CPU)
    assert result.unsupported == {"vllm_f8t": "vLLM has a file for FP8 with a scale per channel"}


@pytest.mark.usefixtures("vllm")
def test_what_fails_while_it_compiles_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise AssertionError("sizes")

    monkeypatch.setattr(sys.modules[f"{PLACE}.fused_moe"], "fused_experts", fail)
    impls = [ours("bf16"), peer("vllm_bf16", OSTINATO_MOE_ROUTING="vllm")]
    (result,) = time_cases(BENCHMARK, [CASE], impls, CPU)
    assert result.unsupported == {"vllm_bf16": "AssertionError: sizes"}
    assert len(result.rows) == 1


@pytest.mark.usefixtures("vllm")
def test_routing_is_sglangs_unless_the_variable_says_another() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such file"):
        ADAPTER._route("sglang", "nowhere")
    with pytest.raises(ImportError, match="OSTINATO_MOE_ROUTING: got 'x', expected sglang or vllm"):
        ADAPTER._route("x", None)
    with pytest.raises(ImportError, match="vllm has no library _moe_C"):
        peer("vllm_i8").prepare()
