"""The kernels that a model launches, known before its first token."""

from __future__ import annotations

import torch

from ostinato.model.config import ModelConfig
from ostinato.model.layers import AnyLinear, W8A8Linear
from ostinato.model.llama import Llama
from ostinato.ops.append_launch import append_kernel
from ostinato.ops.decode_launch import decode_kernels
from ostinato.ops.embed_launch import embed_kernel
from ostinato.ops.precompile import Variant, layer_kernels, precompile
from ostinato.ops.prefill_launch import prefill_kernels
from ostinato.ops.sample_launch import sample_kernel

# How the input of each layer of a decoder layer is quantised: with what comes before it.
QUANTIZATION_OF = {"qkv": "rms_norm", "o": "per_token", "gate_up": "rms_norm", "down": "silu_mul"}
LM_HEAD_QUANTIZATION = "rms_norm"


def compile_kernels(model: Llama) -> None:
    """Compile at once what a model on CUDA may launch; does nothing for one on the CPU.

    Without this the kernels are compiled one after another, each at its first launch.

    Raises:
        KernelBuildError: when compiling fails.
    """
    if model.device.type == "cuda":
        precompile(kernels_of(model))


def kernels_of(model: Llama) -> list[Variant]:
    """Return the kernels of a model for any number of tokens, on its GPU or an H200.

    They are those of its embedding and W8A8 layers, of `append_kv` and of attention, with a cache
    of the model's own dtype, and of sampling. Some are named more than once.
    """
    device = model.device if model.device.type == "cuda" else None
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
            model.config.dtype,
            out_dtype=linear.out_dtype,
            batch_invariant=linear.batch_invariant,
            device=device,
        )
    ]
    return [*unquantized_kernels(model.config, batch_invariant=model.batch_invariant), *w8a8]


def unquantized_kernels(config: ModelConfig, *, batch_invariant: bool = True) -> list[Variant]:
    """Return the kernels of a model that do not depend on how its weights are quantised."""
    dtype, group = config.dtype, config.num_heads // config.num_kv_heads
    return [
        embed_kernel(dtype),
        append_kernel(dtype, dtype),
        *decode_kernels(dtype, config.head_dim, group, batch_invariant=batch_invariant),
        *prefill_kernels(dtype, config.head_dim, batch_invariant=batch_invariant),
        sample_kernel(torch.float32),  # what `Llama` returns
    ]
