"""The kernels that a model launches, known before its first token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from ..jit.variant import Variant
from ..ops.attention.append_kv_cuda import append_kernel
from ..ops.attention.decode_cuda import decode_kernels
from ..ops.attention.dequantize_kv import prompt_kernels
from ..ops.attention.l2_partition import L2Probe
from ..ops.collective.collective_cuda import MOST_RANKS, collective_kernel
from ..ops.common.device import KERNEL_NAMES
from ..ops.embed import embed_kernel
from ..ops.linear.precompile import precompile
from ..ops.linear.quantize_cuda import Quantize, input_kernel
from ..ops.moe.combine_cuda import MoeCombine
from ..ops.moe.route_cuda import MoeRoute
from ..ops.sampling.process_logits import ProcessLogits
from ..ops.sampling.sample_cuda import sample_kernel
from ..ops.sampling.softcap import softcap_kernel
from ..ops.sampling.token_logprobs import TokenLogprobsKernel
from .config import ModelConfig
from .decoder import Decoder
from .kv_format import KVFormat
from .norms import fp32_kind, is_power_of_two


def compile_kernels(model: Decoder, cache_format: KVFormat | None = None) -> None:
    """Compile at once what a model on CUDA may launch; does nothing for one on the CPU.

    Without this the kernels are compiled one after another, each at its first launch.

    Args:
        model: the decoder.
        cache_format: of the KV cache; None: what the checkpoint is made for.

    Raises:
        KernelBuildError: when compiling fails.
    """
    if model.device.type == "cuda":
        precompile(model.kernels(cache_format), model.device)


def model_kernels(
    config: ModelConfig, *, cache_format: KVFormat | None = None, batch_invariant: bool = True
) -> list[Variant]:
    """Return the kernels of a model that do not depend on how its weights are quantised.

    Args:
        config: shape of the model.
        cache_format: of the KV cache; None is pages in the model's dtype.
        batch_invariant: as of `ops.paged_attention`.
    """
    cache_format = KVFormat(config.dtype) if cache_format is None else cache_format
    dtype, group = config.dtype, config.num_heads // config.num_kv_heads
    kv_dtype = cache_format.dtype
    scaled = config.logits_scale != 1.0 and not is_power_of_two(config.logits_scale)
    return [
        *((input_kernel(fp32_kind(config.norm.kind), dtype, dtype),) if scaled else ()),
        embed_kernel(dtype),
        append_kernel(dtype, kv_dtype),
        *decode_kernels(
            dtype, config.head_dim, group, kv_dtype=kv_dtype, batch_invariant=batch_invariant
        ),
        *prompt_kernels(dtype, config.head_dim, kv_dtype, batch_invariant=batch_invariant),
        *((softcap_kernel(torch.float32),) if config.logits_softcap else ()),
        sample_kernel(torch.float32),  # what a `Decoder` returns
        *(ProcessLogits(), TokenLogprobsKernel()),  # where requests ask for more
        L2Probe(),  # which the cache asks (ostinato.models.l2.probe)
    ]


def kernels_with_norms(
    config: ModelConfig, *, cache_format: KVFormat | None = None, batch_invariant: bool = True
) -> list[Variant]:
    """Return `model_kernels` and, for families with such, the norm that nothing is fused with."""
    norm = input_kernel(config.norm.input_kind, config.dtype, config.dtype)
    known = model_kernels(config, cache_format=cache_format, batch_invariant=batch_invariant)
    return [norm, *known]


def kernels_with_experts(
    config: ModelConfig, *, cache_format: KVFormat | None = None, batch_invariant: bool = True
) -> list[Variant]:
    """Return `kernels_with_norms` and, for mixtures of experts, routing and the sum."""
    known = kernels_with_norms(config, cache_format=cache_format, batch_invariant=batch_invariant)
    results = KERNEL_NAMES[config.dtype]
    return [MoeRoute(dtype=KERNEL_NAMES[torch.float32]), MoeCombine(dtype=results), *known]


def collective_kernels(dtype: torch.dtype, size: int, beside: Iterable[Variant]) -> list[Variant]:
    """Return the collectives of one of `size` ranks, where these reach each other's memory.

    Args:
        dtype: of the model.
        size: how many ranks divide it.
        beside: all else that a rank launches. Of its norms each may be one launch with a sum.
    """
    if size > MOST_RANKS:
        return []
    total = collective_kernel("sum", size, dtype, dtype)
    norms = [
        replace(
            collective_kernel("rms_norm", size, dtype, dtype),
            out_dtype=kernel.out_dtype,
            weight_dtype=kernel.weight_dtype,
            group=kernel.group,
        )
        for kernel in beside
        if isinstance(kernel, Quantize) and kernel.kind == "rms_norm" and not kernel.asymmetric
    ]
    # Of logits, and of heads that one norm is over.
    gathers = [collective_kernel("gather", size, x, x) for x in (torch.float32, dtype)]
    return [total, *norms, *gathers]
