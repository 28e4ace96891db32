"""Which kernels a linear layer launches, and compiling many of them at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ...jit import compiler
from ...jit.location import cache_folder
from ...jit.mode import BuildMode
from ...jit.targets import target_for
from ...jit.toolchain import find_cutlass, find_nvcc
from ...jit.variant import Variant
from ..common.device import KERNEL_NAMES, device_index, gpu, runs
from . import tile_table, tile_tuning
from .block_scales import SCALE_CHANNELS
from .fused_cuda import ActivatedLinear, FusedLinear, activated_kernel, fused_kernel
from .gemm_variants import BLOCK_E4M3, GemmSmallM, sharing
from .linear import DTYPES_16_BIT
from .quantize_cuda import GATED, GROUP, input_kernel

__all__ = [
    "Variant",
    "block_kernels",
    "dense_layer_kernels",
    "gated_kernels",
    "layer_kernels",
    "precompile",
]


def layer_kernels(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    activations: torch.dtype,
    *,
    fast_accum: bool = True,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    asymmetric: bool = False,
    device: torch.device | None = None,
) -> list[Variant]:
    """Return what quantising activations and multiplying them by a packed weight may launch.

    Args:
        kind: what comes before the layer (see `input_kernel`).
        shape: [N, K] of the weight.
        dtype: of the weight, int8 or float8_e4m3fn.
        activations: dtype of the layer's input and its norm weight.
        fast_accum: as of `w8a8_linear`.
        out_dtype: of the layer's output; by default that of its input.
        batch_invariant: likewise.
        asymmetric: whether tokens have zero points of their own.
        device: the GPU, whose size and tuned choices count; None for an H200 as the table has it.
    """
    name, sms = ("", tile_table.H200_SMS) if device is None else gpu(device_index(device))
    operand, in_dtype = KERNEL_NAMES[dtype], KERNEL_NAMES[activations]
    output = in_dtype if out_dtype is None else KERNEL_NAMES[out_dtype]
    gemms = tile_tuning.variants(
        name, sms, *shape, operand, output, fast_accum=fast_accum, batch_invariant=batch_invariant
    )
    found: list[Variant] = [input_kernel(kind, activations, dtype, asymmetric=asymmetric), *gemms]
    streams = any(isinstance(gemm, GemmSmallM) for gemm in gemms)
    if streams and not asymmetric:
        results = out_dtype or activations
        fused: Variant | None
        if kind in GATED:
            fused = activated_kernel(shape[1], dtype, results)
        else:
            fused = fused_kernel(kind, activations, shape[1], dtype, results)
        found += [] if fused is None else [fused]
    return found


def gated_kernels(kind: str, beside: Iterable[Variant]) -> list[Variant]:
    """Return what the first layers of MLPs may launch, whose second layers are among `beside`.

    Args:
        kind: of the activation.
        beside: all else that a model launches. Each layer behind a norm may be of gates and ups.
    """
    kernels = dict.fromkeys(beside)
    if kind not in GATED or not any(isinstance(kernel, ActivatedLinear) for kernel in kernels):
        return []
    return [
        replace(kernel, activation=kind)
        for kernel in kernels
        if isinstance(kernel, FusedLinear)
        and kernel.kind == "rms_norm"
        and kernel.in_dtype == kernel.out_dtype
    ]


def block_kernels(
    kind: str,
    shape: tuple[int, int],
    activations: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    device: torch.device | None = None,
    scale_channels: Sequence[int] = (SCALE_CHANNELS, GROUP),
) -> list[Variant]:
    """Return what quantising activations by groups and `fp8_block_linear` with them may launch.

    The arguments are those of `layer_kernels`; `scale_channels` says how many channels may share a
    scale.
    """
    name, sms = ("", tile_table.H200_SMS) if device is None else gpu(device_index(device))
    output = KERNEL_NAMES[out_dtype or activations]
    gemms = tile_tuning.variants(
        *(name, sms, *shape, BLOCK_E4M3, output),
        fast_accum=False,
        batch_invariant=batch_invariant,
    )
    products = [sharing(gemm, channels) for channels in scale_channels for gemm in gemms]
    return [input_kernel(kind, activations, torch.float8_e4m3fn, GROUP), *products]


def dense_layer_kernels(
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[Variant]:
    """Return what `linear` may launch for a packed weight, whatever the number of rows.

    Args:
        shape: [N, K] of the weight.
        dtype: of the weight; in fp32 torch's operators multiply.
        out_dtype: as of `linear`.
        device: as of `layer_kernels`.
    """
    if dtype not in DTYPES_16_BIT:
        return []
    names = (KERNEL_NAMES[dtype], KERNEL_NAMES[dtype if out_dtype is None else out_dtype])
    name, sms = ("", tile_table.H200_SMS) if device is None else gpu(device_index(device))
    gemms = tile_tuning.variants(name, sms, *shape, *names, fast_accum=False, batch_invariant=True)
    return [*gemms]


def precompile(variants: Iterable[Variant], device: torch.device | None = None) -> None:
    """Compile side by side those of the variants that are not compiled yet, with one line said.

    Where nothing may or can be compiled nothing is done: then the first launch of a variant that is
    missing says what to do.

    Args:
        variants: which; those that a GPU runs no kernels of are left out.
        device: the GPU, None for the current one.

    Raises:
        KernelBuildError: when compiling fails.
        ValueError: when OSTINATO_DELAY_SITE names no site of any kernel, or OSTINATO_CAPABILITY
            what the device can not stand in for.
    """
    if not compiler.jit_enabled() or find_nvcc() is None:
        return
    mode = BuildMode.from_environment()
    mode.check("OSTINATO_DELAY_SITE")
    index = torch.cuda.current_device() if device is None else device_index(device)
    target = target_for(index)
    plans = [
        compiler.plan(variant, mode, target)
        for variant in dict.fromkeys(variants)
        if runs(type(variant), index)
    ]
    if find_cutlass() is None:
        plans = [plan for plan in plans if not plan.sources.uses_cutlass]
    missing = [plan for plan in plans if compiler.find(plan) is None]
    if missing:
        print(
            f"ostinato: compiling {len(missing)} kernels once, into {cache_folder()}",
            file=sys.stderr,
            flush=True,
        )
        compiler.build(missing)
