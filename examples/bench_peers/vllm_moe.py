"""vLLM's fused experts in Triton, with its tuned file for the card, after its `fused_topk`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from ostinato.bench.harness.benchmark import Implementation
from ostinato.bench.moe.cases import Case
from ostinato.bench.moe.inputs import Inputs, Weights

_PLACE = "vllm.model_executor.layers.fused_moe"
_PRECISIONS = {
    "vllm_i8": "int8",
    "vllm_f8": "fp8",
    "vllm_blk": "fp8-block",
    "vllm_bf16": "bf16",
}


def peers(section: str, environ: Mapping[str, str]) -> list[Implementation[Any, Any]]:
    """Return the implementations for `bench moe`."""
    if section != "moe":
        return []
    return [
        Implementation(name, precision, _bind, prepare=_library, package="vllm")
        for name, precision in _PRECISIONS.items()
    ]


@cache
def _library() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Return the modules of the experts, of routing, and of how weights are quantised."""
    importlib.import_module("vllm._custom_ops")  # the kernels of routing and quantisation
    return (
        importlib.import_module(f"{_PLACE}.fused_moe"),
        importlib.import_module(f"{_PLACE}.router.fused_topk_router"),
        importlib.import_module(f"{_PLACE}.config"),
    )


def _quantization(weights: Weights) -> Any:
    _, _, config = _library()
    first, second = weights.gate_up_scale, weights.down_scale
    if first is None or second is None:
        return None
    if first.dim() == 3:
        return config.fp8_w8a8_moe_quant_config(first, second, block_shape=[128, 128])
    scales = (first.unsqueeze(2), second.unsqueeze(2))
    if weights.gate_up.dtype is torch.int8:
        return config.int8_w8a8_moe_quant_config(*scales, None, None, per_act_token_quant=True)
    return config.fp8_w8a8_moe_quant_config(
        *scales, per_act_token_quant=True, per_out_ch_quant=True
    )


def _bind(case: Case, sets: Sequence[Inputs]) -> Sequence[Callable[[], torch.Tensor]]:
    experts, router, _ = _library()

    def bound(s: Inputs) -> Callable[[], torch.Tensor]:
        w, quantization = s.weights, _quantization(s.weights)

        def call() -> torch.Tensor:
            logits = functional.linear(s.x, w.router)
            chosen, ids, *_ = router.fused_topk(s.x, logits, case.shape.top_k, renormalize=True)
            y: torch.Tensor = experts.fused_experts(
                s.x, w.gate_up, w.down, chosen, ids, quant_config=quantization
            )
            return y

        return call

    calls = [bound(one) for one in sets]
    calls[0]()  # compiles, which no capture could
    return calls
