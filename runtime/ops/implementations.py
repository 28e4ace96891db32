"""Which op runs on a kernel of ours and which on torch's operators, for a GPU."""

from __future__ import annotations

import torch

from ..jit.targets import Capability, Target, capability_of, target_for
from ..jit.variant import Variant
from .attention.append_kv_cuda import AppendKV
from .attention.decode_variants import AttentionDecode
from .attention.merge_states import MergeStates
from .attention.prefill_variants import AttentionPrefill
from .collective.collective_cuda import Collective
from .common.device import device_index
from .embed import Embed
from .linear.fused_cuda import FusedLinear
from .linear.gemm_variants import GemmTiled
from .linear.quantize_cuda import Quantize
from .linear.w8a8_torch import operator_of
from .moe.combine_cuda import MoeCombine
from .moe.moe_linear_cuda import MoeLinear
from .moe.route_cuda import MoeRoute
from .sampling.process_logits import ProcessLogits
from .sampling.sample_cuda import Sample
from .sampling.softcap import Softcap
from .sampling.token_logprobs import TokenLogprobsKernel

_FAMILIES: dict[str, type[Variant]] = {
    "embed": Embed,
    "norms, activations, quantize": Quantize,
    "append_kv": AppendKV,
    "attention, decode": AttentionDecode,
    "attention, prefill": AttentionPrefill,
    "merge_states": MergeStates,
    "moe_route": MoeRoute,
    "moe_combine": MoeCombine,
    "all_reduce, all_gather, peers": Collective,
    "softcap": Softcap,
    "process_logits": ProcessLogits,
    "sample": Sample,
    "token_logprobs": TokenLogprobsKernel,
}
_OPERANDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def implementations(capability: Capability, target: Target | None) -> dict[str, str]:
    """Return what each op runs on, on a GPU: "kernel (sm_90a)", or "torch" and the operator.

    Args:
        capability: of the GPU.
        target: what its kernels are compiled for; None where it has none.
    """
    kernel = f"kernel ({target})"
    found = {
        op: kernel if family.supports(capability) else "torch" for op, family in _FAMILIES.items()
    }
    for name, dtype in _OPERANDS.items():
        product = kernel if GemmTiled.supports(capability) else operator_of(dtype, capability)
        found[f"w8a8_linear, {name}"] = product
    for op in ("attention, decode", "attention, prefill"):
        found[f"{op}, 8-bit KV cache"] = found[op]
    has_gemm = GemmTiled.supports(capability)
    found["fp8_block_linear"] = kernel if has_gemm else "torch (mm of dequantised operands)"
    has_experts = MoeLinear.supports(capability)
    found["moe_linear"] = kernel if has_experts else "torch (bmm of each row's expert)"
    found["dynamic_w8a8_linear, one token"] = (
        kernel if FusedLinear.supports(capability) else "quantize, then w8a8_linear"
    )
    found["rms_norm_w8a8_mlp, one token"] = (
        kernel if FusedLinear.supports(capability) else "its linear layers, and quantize"
    )
    found["linear, 16 bits"] = kernel if GemmTiled.supports(capability) else "torch (mm)"
    found["linear, fp32"] = "torch (mm)"
    return found


def implementations_on(device: torch.device) -> dict[str, str]:
    """Return `implementations` of a device's GPU; nothing for the CPU, which has torch alone.

    Raises:
        ValueError: when OSTINATO_CAPABILITY names what the device can not stand in for.
    """
    if device.type != "cuda":
        return {}
    index = device_index(device)
    return implementations(capability_of(index), target_for(index))
