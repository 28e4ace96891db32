"""The kernels that a model launches, known before its first token."""

from __future__ import annotations

import torch

from ..ops.attention.append_kv_cuda import append_kernel
from ..ops.attention.decode_cuda import decode_kernels
from ..ops.attention.l2_partition import L2Probe
from ..ops.attention.prefill_cuda import prefill_kernels
from ..ops.embed import embed_kernel
from ..ops.linear.precompile import (
    Variant,
    layer_kernels,
    precompile,
)
from ..ops.linear.quantize_cuda import quantize_kernel
from ..ops.sampling.sample_cuda import sample_kernel
from .config import ModelConfig
from .layers import (
    AnyLinear,
    W8A8Linear,
)
from .llama import Llama

# How the input of each layer of a decoder layer is quantised: with what comes before it, which is
# a kernel of its own where the layer is not W8A8.
QUANTIZATION_OF = {"qkv": "rms_norm", "o": "per_token", "gate_up": "rms_norm", "down": "silu_mul"}
LM_HEAD_QUANTIZATION = "rms_norm"


def compile_kernels(model: Llama) -> None:
    """Compile at once what a model on CUDA may launch; does nothing for one on the CPU.

    Without this the kernels are compiled one after another, each at its first launch.

    Raises:
        KernelBuildError: when compiling fails.
    """
    if model.device.type == "cuda":
        precompile(kernels_of(model), model.device)


def kernels_of(model: Llama) -> list[Variant]:
    """Return the kernels of a model for any number of tokens, on its GPU or an H200.

    They are those of its embedding, W8A8 layers, norms and gates, of `append_kv` and of attention,
    with a cache of the model's own dtype, and of sampling. Some are named more than once.
    """
    device, dtype = model.device if model.device.type == "cuda" else None, model.config.dtype
    uses: list[tuple[str, AnyLinear]] = [(LM_HEAD_QUANTIZATION, model.lm_head)]
    for layer in model.layers:
        uses += [(kind, getattr(layer, name)) for name, kind in QUANTIZATION_OF.items()]
    w8a8 = [
        variant
        for kind, linear in uses
        if isinstance(linear, W8A8Linear)
        for variant in layer_kernels(
            kind,
            (linear.weight.shape[0], linear.weight.shape[1]),
            linear.weight.dtype,
            dtype,
            out_dtype=linear.out_dtype,
            batch_invariant=linear.batch_invariant,
            device=device,
        )
    ]
    plain = [
        variant
        for kind, linear in uses
        if not isinstance(linear, W8A8Linear)
        for variant in plain_layer_kernels(kind, dtype)
    ]
    others = unquantized_kernels(model.config, batch_invariant=model.batch_invariant)
    return [*others, *plain, *w8a8]


def plain_layer_kernels(kind: str, dtype: torch.dtype) -> list[Variant]:
    """Return what a layer that is not W8A8 launches: of ours, the norm or gate before it.

    Args:
        kind: how a W8A8 layer in its place would quantise its input (`QUANTIZATION_OF`).
        dtype: of the model.
    """
    return [] if kind == "per_token" else [quantize_kernel(kind, dtype, dtype)]


def unquantized_kernels(config: ModelConfig, *, batch_invariant: bool = True) -> list[Variant]:
    """Return the kernels of a model that do not depend on how its weights are quantised."""
    dtype, group = config.dtype, config.num_heads // config.num_kv_heads
    return [
        embed_kernel(dtype),
        append_kernel(dtype, dtype),
        *decode_kernels(dtype, config.head_dim, group, batch_invariant=batch_invariant),
        *prefill_kernels(dtype, config.head_dim, batch_invariant=batch_invariant),
        sample_kernel(torch.float32),  # what `Llama` returns
        L2Probe(),  # which the cache asks (ostinato.models.l2.probe)
    ]
