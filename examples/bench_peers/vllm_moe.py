"""vLLM's fused experts in Triton, with its tuned file for the card, and its chain of DeepGEMM.

Tokens are routed by sglang-kernel's `topk_softmax`, of the package or of the file that
OSTINATO_SGL_LIBRARY names (see sgl_kernel.py); with OSTINATO_MOE_ROUTING=vllm by vLLM's own.

`vllm_f8t` is `vllm_f8` with the tiles of vLLM's file for FP8 in blocks, where it has that file for
the card and the experts, and none for FP8 with a scale per channel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from ostinato.bench.harness.benchmark import Implementation
from ostinato.bench.harness.peers import load_adapter
from ostinato.bench.moe.cases import Case
from ostinato.bench.moe.inputs import Inputs, Weights

ROUTING = "OSTINATO_MOE_ROUTING"
_PLACE = "vllm.model_executor.layers.fused_moe"
_PRECISIONS = {
    "vllm_i8": "int8",
    "vllm_f8": "fp8",
    "vllm_f8t": "fp8",
    "vllm_blk": "fp8-block",
    "vllm_dg": "fp8-block",
    "vllm_bf16": "bf16",
}
_BLOCK = [128, 128]
Pair = tuple[torch.Tensor, torch.Tensor]
Route = Callable[[torch.Tensor, torch.Tensor, int], Pair]


def peers(section: str, environ: Mapping[str, str]) -> list[Implementation[Any, Any]]:
    """Return the implementations for `bench moe`."""
    if section != "moe":
        return []
    route = partial(_route, environ.get(ROUTING, "sglang"), environ.get("OSTINATO_SGL_LIBRARY"))
    return [
        Implementation(
            name,
            precision,
            partial(_bind, name, route),
            prepare=partial(_prepare, name, route),
            package="vllm",
        )
        for name, precision in _PRECISIONS.items()
    ]


@cache
def _module(name: str) -> ModuleType:
    importlib.import_module("vllm._custom_ops")  # the kernels of routing and quantisation
    return importlib.import_module(name)


def _prepare(name: str, route: Callable[[], Route]) -> None:
    """Import what a peer calls.

    Raises:
        ImportError: when vLLM, its kernels of experts, DeepGEMM or sglang-kernel is not there.
    """
    _module(f"{_PLACE}.fused_moe")
    if not hasattr(torch.ops._moe_C, "moe_align_block_size"):
        raise ImportError("vllm has no library _moe_C, which sorts tokens by expert")
    if name == "vllm_dg":
        importlib.import_module("vllm.third_party.deep_gemm")
        _module(f"{_PLACE}.deep_gemm_utils")
    route()


@cache
def _route(which: str, library: str | None) -> Route:
    """Return what chooses the experts of each token, and their weights, by logits."""
    if which == "vllm":
        router = _module(f"{_PLACE}.router.fused_topk_router")

        def vllm(x: torch.Tensor, logits: torch.Tensor, k: int) -> Pair:
            weights, ids, *_ = router.fused_topk(x, logits, k, renormalize=True)
            return weights, ids

        return vllm
    if which != "sglang":
        raise ImportError(f"{ROUTING}: got {which!r}, expected sglang or vllm")
    load_adapter(Path(__file__).with_name("sgl_kernel.py")).load_sgl(library)

    def sglang(x: torch.Tensor, logits: torch.Tensor, k: int) -> Pair:
        weights = torch.empty(x.size(0), k, dtype=torch.float32, device=x.device)
        ids = torch.empty(x.size(0), k, dtype=torch.int32, device=x.device)
        torch.ops.sgl_kernel.topk_softmax(weights, ids, logits, True, 0.0, None)
        return weights, ids

    return sglang


def _quantization(weights: Weights) -> Any:
    config = _module(f"{_PLACE}.config")
    first, second = weights.gate_up_scale, weights.down_scale
    if first is None or second is None:
        return None
    if first.dim() == 3:
        return config.fp8_w8a8_moe_quant_config(first, second, block_shape=_BLOCK)
    scales = (first.unsqueeze(2), second.unsqueeze(2))
    if weights.gate_up.dtype is torch.int8:
        return config.int8_w8a8_moe_quant_config(*scales, None, None, per_act_token_quant=True)
    return config.fp8_w8a8_moe_quant_config(
        *scales, per_act_token_quant=True, per_out_ch_quant=True
    )


def _tiles(case: Case) -> Any:
    """Return a context in which vLLM takes the tiles of its file for FP8 in blocks.

    Raises:
        ValueError: where it has no such file, or one for FP8 with a scale per channel.
    """
    find, shape = _module(f"{_PLACE}.fused_moe").get_moe_configs, case.shape
    if find(shape.experts, shape.intermediate, "fp8_w8a8") is not None:
        raise ValueError("vLLM has a file for FP8 with a scale per channel")
    found = find(shape.experts, shape.intermediate, "fp8_w8a8", *_BLOCK)
    if found is None:
        raise ValueError("vLLM has no file for FP8 in blocks")
    nearest = min(found, key=lambda tokens: abs(tokens - case.m))
    return _module(_PLACE).override_config(found[nearest])


def _bind(
    name: str, route: Callable[[], Route], case: Case, sets: Sequence[Inputs]
) -> Sequence[Callable[[], torch.Tensor]]:
    experts, choose, k = _module(f"{_PLACE}.fused_moe"), route(), case.shape.top_k
    if name == "vllm_f8t":
        _tiles(case)  # raises

    def bound(s: Inputs) -> Callable[[], torch.Tensor]:
        w, quantization = s.weights, _quantization(s.weights)

        def triton() -> torch.Tensor:
            chosen, ids = choose(s.x, functional.linear(s.x, w.router), k)
            with _tiles(case) if name == "vllm_f8t" else nullcontext():
                y: torch.Tensor = experts.fused_experts(
                    s.x, w.gate_up, w.down, chosen, ids, quant_config=quantization
                )
            return y

        def deep_gemm() -> torch.Tensor:
            chosen, ids = choose(s.x, functional.linear(s.x, w.router), k)
            return _grouped(s, chosen, ids)

        return deep_gemm if name == "vllm_dg" else triton

    calls = [bound(one) for one in sets]
    try:
        calls[0]()  # compiles, which no capture could
    except (RuntimeError, ValueError, OSError):
        raise
    except Exception as error:  # vLLM asserts, and Triton has errors of its own
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return calls


def _grouped(s: Inputs, chosen: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Multiply by DeepGEMM's grouped products between vLLM's kernels, as its experts do."""
    moved = _module(f"{_PLACE}.deep_gemm_utils")
    library = _module("vllm.utils.deep_gemm")
    fp8 = _module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    w = s.weights
    codes, scale = fp8.per_token_group_quant_fp8(s.x, 128, use_ue8m0=False)
    codes, scale, ends, inverse, aligned = moved.deepgemm_moe_permute(
        codes, scale, ids, w.gate_up.size(0), None, None, use_psum_layout=True
    )
    with library.mk_alignment_scope(aligned):
        gate_up = s.x.new_empty(codes.size(0), w.gate_up.size(1))
        library.m_grouped_fp8_gemm_nt_contiguous(
            (codes, scale), (w.gate_up, w.gate_up_scale), gate_up, ends, use_psum_layout=True
        )
        inner, of_inner = fp8.silu_mul_per_token_group_quant_fp8_colmajor(
            gate_up, use_ue8m0=False, expert_ends=ends, expert_alignment=aligned
        )
        y = s.x.new_empty(codes.size(0), s.x.size(1))
        library.m_grouped_fp8_gemm_nt_contiguous(
            (inner, of_inner), (w.down, w.down_scale), y, ends, use_psum_layout=True
        )
    moved.deepgemm_unpermute_and_reduce(y, ids, chosen, inverse, None, s.out)
    return s.out
