"""Appending to the cache on CUDA: from tensors to a launch of csrc/attention/append/append.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.variant import FLOAT_DTYPES, OPERAND_DTYPES, Variant, check
from ..common import pdl
from ..common.device import KERNEL_NAMES, address_of, current_stream, heads_of, on_device, slots_of


@dataclass(frozen=True, kw_only=True)
class AppendKV(Variant):
    """Norm and rotation of q and k, and their way and that of v into the paged cache.

    Args:
        dtype: of q, k and v.
        cache_dtype: of the cache: dtype, int8 or e4m3.
    """

    family: ClassVar[str] = "append_kv"
    source: ClassVar[Path] = CSRC / "attention" / "append" / "append.cu"
    needs: ClassVar[frozenset[str]] = frozenset()

    dtype: str
    cache_dtype: str = ""

    def __post_init__(self) -> None:
        check("dtype", self.dtype, FLOAT_DTYPES)
        if not self.cache_dtype:
            object.__setattr__(self, "cache_dtype", self.dtype)
        check("cache_dtype", self.cache_dtype, (self.dtype, *OPERAND_DTYPES))

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}-{self.cache_dtype}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_DTYPE": self.dtype, "OSTINATO_CACHE_DTYPE": self.cache_dtype}


_LISTED = tuple(
    AppendKV(dtype=dtype, cache_dtype=cache_dtype)
    for dtype in FLOAT_DTYPES
    for cache_dtype in (dtype, *OPERAND_DTYPES)
)
register_family(AppendKV, _LISTED)


@cache
def append_kernel(dtype: torch.dtype, cache_dtype: torch.dtype) -> AppendKV:
    """Return the kernel for q, k and v of `dtype` and a cache of `cache_dtype`."""
    return AppendKV(dtype=KERNEL_NAMES[dtype], cache_dtype=KERNEL_NAMES[cache_dtype])


def append_heads(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    interleaved: bool,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_after_rotation: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_out: torch.Tensor | None,
    v_scale_out: torch.Tensor | None,
) -> None:
    """Launch the kernel on torch's current stream.

    The arguments are those of the op, checked, for at least one token. The kernel reads none of
    these tensors before the kernels in front of it on the stream have ended.
    """
    device = k.get_device()
    tokens, heads_kv, dim = k.shape
    with on_device(device):
        stream = current_stream(device)
        variant = append_kernel(k.dtype, k_cache.dtype)
        load(variant, device=device, stream=stream).launch(
            k=heads_of(k),
            v=heads_of(v),
            k_cache=slots_of(k_cache),
            v_cache=slots_of(v_cache),
            slot_mapping=slot_mapping.data_ptr(),
            tokens=tokens,
            heads_kv=heads_kv,
            dim=dim,
            page_size=k_cache.size(1),
            stream=stream,
            q=heads_of(q),
            q_out=heads_of(q_out),
            heads_q=0 if q is None else q.size(1),
            k_scale=slots_of(k_scale),
            k_scale_per_token=_is_per_token(k_scale),
            v_scale=slots_of(v_scale),
            v_scale_per_token=_is_per_token(v_scale),
            k_scale_out=slots_of(k_scale_out),
            v_scale_out=slots_of(v_scale_out),
            positions=address_of(positions),
            cos_sin=address_of(cos_sin),
            cos_sin_stride=0 if cos_sin is None else cos_sin.stride(0),
            rotary_dim=0 if cos_sin is None else cos_sin.size(1),
            interleaved=interleaved,
            q_norm_weight=address_of(q_norm_weight),
            q_norm_is_fp32=q_norm_weight is not None and q_norm_weight.dtype is torch.float32,
            k_norm_weight=address_of(k_norm_weight),
            k_norm_is_fp32=k_norm_weight is not None and k_norm_weight.dtype is torch.float32,
            norm_eps=norm_eps,
            norm_after_rotation=norm_after_rotation,
            pdl=pdl.enabled(),
        )


def _is_per_token(scale: torch.Tensor | None) -> bool:
    return scale is not None and scale.ndim == 3
