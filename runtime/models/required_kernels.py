"""The kernels that a model launches, known before its first token."""

from __future__ import annotations

import torch

from ..jit.variant import Variant
from ..ops.attention.append_kv_cuda import append_kernel
from ..ops.attention.decode_cuda import decode_kernels
from ..ops.attention.l2_partition import L2Probe
from ..ops.attention.prefill_cuda import prefill_kernels
from ..ops.embed import embed_kernel
from ..ops.linear.precompile import precompile
from ..ops.linear.quantize_cuda import input_kernel
from ..ops.sampling.process_logits import ProcessLogits
from ..ops.sampling.sample_cuda import sample_kernel
from ..ops.sampling.softcap import softcap_kernel
from ..ops.sampling.token_logprobs import TokenLogprobsKernel
from .config import ModelConfig
from .decoder import Decoder
from .norms import fp32_kind, is_power_of_two


def compile_kernels(model: Decoder) -> None:
    """Compile at once what a model on CUDA may launch; does nothing for one on the CPU.

    Without this the kernels are compiled one after another, each at its first launch.

    Raises:
        KernelBuildError: when compiling fails.
    """
    if model.device.type == "cuda":
        precompile(model.kernels(), model.device)


def model_kernels(config: ModelConfig, *, batch_invariant: bool = True) -> list[Variant]:
    """Return the kernels of a model that do not depend on how its weights are quantised."""
    dtype, group = config.dtype, config.num_heads // config.num_kv_heads
    scaled = config.logits_scale != 1.0 and not is_power_of_two(config.logits_scale)
    return [
        *((input_kernel(fp32_kind(config.norm.kind), dtype, dtype),) if scaled else ()),
        embed_kernel(dtype),
        append_kernel(dtype, dtype),
        *decode_kernels(dtype, config.head_dim, group, batch_invariant=batch_invariant),
        *prefill_kernels(dtype, config.head_dim, batch_invariant=batch_invariant),
        *((softcap_kernel(torch.float32),) if config.logits_softcap else ()),
        sample_kernel(torch.float32),  # what a `Decoder` returns
        *(ProcessLogits(), TokenLogprobsKernel()),  # where requests ask for more
        L2Probe(),  # which the cache asks (ostinato.models.l2.probe)
    ]


def kernels_with_norms(config: ModelConfig, *, batch_invariant: bool = True) -> list[Variant]:
    """Return `model_kernels` and, for families with such, the norm that nothing is fused with."""
    norm = input_kernel(config.norm.input_kind, config.dtype, config.dtype)
    return [norm, *model_kernels(config, batch_invariant=batch_invariant)]
