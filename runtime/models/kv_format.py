"""How a KV cache stores keys and values: their dtype, and the scales of an 8-bit one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from .config import ModelConfig
from .modules import share

ScaleKind = Literal["static", "token"]

AUTO = "auto"
# As the command line and the benchmarks call dtypes of a cache.
KV_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
SCALE_KINDS: tuple[ScaleKind, ...] = ("static", "token")
_NAMES = {dtype: name for name, dtype in KV_DTYPES.items()}
_EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
_SCALE_BYTES = 4


@dataclass(frozen=True)
class KVScales:
    """The 8-bit KV cache that a checkpoint is made for.

    Args:
        dtype: int8 or float8_e4m3fn.
        k: [num_layers] or [num_layers, num_kv_heads] fp32 on the CPU, the factors of each layer's
            stored keys; None where the checkpoint holds no scales.
        v: likewise of values.
    """

    dtype: torch.dtype
    k: torch.Tensor | None
    v: torch.Tensor | None

    def shard(self, rank: int, size: int) -> KVScales:
        """Return the scales of the KV heads that a rank keeps.

        Raises:
            UnsupportedModelError: for heads that so many ranks cannot divide.
        """
        if self.k is None or self.v is None or self.k.ndim == 1:
            return self
        heads = self.k.size(1)
        kept = share("kv_scales", heads, heads, rank, size, replicated=True)
        return replace(self, k=self.k[:, kept], v=self.v[:, kept])


@dataclass(frozen=True)
class KVFormat:
    """How a cache stores keys and values.

    Args:
        dtype: of the pages: that of the model, int8 or float8_e4m3fn.
        scales: of 8 bits, else None. "static": one factor of a layer's keys and one of its values,
            or one for each KV head. "token": one for each token and head, computed when it is
            written.
        k_scale: static factors of keys, [num_layers] or [num_layers, num_kv_heads] fp32; None is 1.
        v_scale: likewise of values; given if k_scale is.

    Raises:
        ValueError: for another dtype, scales that do not go with it, and factors that are not
            finite and above 0.
    """

    dtype: torch.dtype
    scales: ScaleKind | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            known = ", ".join(map(str, _NAMES))
            raise ValueError(f"dtype: got {self.dtype}, expected one of {known}")
        if self.quantized and self.scales not in SCALE_KINDS:
            raise ValueError(
                f"scales: got {self.scales!r}, expected 'static' or 'token' for {self.dtype}"
            )
        if not self.quantized and self.scales is not None:
            raise ValueError(f"scales: got {self.scales!r}, expected None for {self.dtype}")
        if (self.k_scale is None) != (self.v_scale is None):
            name = "k_scale" if self.k_scale is None else "v_scale"
            raise ValueError(f"{name}: got None, expected both k_scale and v_scale, or neither")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is None:
                continue
            if self.scales != "static":
                raise ValueError(f"{name}: got a tensor, expected None unless scales are 'static'")
            if not (scale.isfinite() & (scale > 0)).all():
                raise ValueError(f"{name}: got {scale.tolist()}, expected finite numbers above 0")

    @property
    def quantized(self) -> bool:
        """Whether pages are in 8 bits."""
        return self.dtype in _EIGHT_BITS

    @property
    def stores_scales(self) -> bool:
        """Whether each token and head has a scale in the cache.

        Static INT8 has them, too: INT8 has no code for NaN, which the scale of its token shows.
        """
        return self.scales == "token" or (self.scales == "static" and self.dtype is torch.int8)

    def is_like(self, other: KVFormat) -> bool:
        """Return whether caches of both formats are served by the same kernels."""
        return (self.dtype, self.stores_scales) == (other.dtype, other.stores_scales)

    def token_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of one token's keys and values in one layer, with their scales."""
        scales = config.num_kv_heads * _SCALE_BYTES if self.stores_scales else 0
        return 2 * (config.kv_size * self.dtype.itemsize + scales)

    def __str__(self) -> str:
        """Return the dtype and where its scales come from."""
        name = _NAMES[self.dtype]
        if self.scales == "token":
            return f"{name}, a scale per token and head"
        if self.scales is None:
            return name
        if self.k_scale is None:
            return f"{name}, static scales of 1"
        per = "layer" if self.k_scale.ndim == 1 else "layer and head"
        return f"{name}, static scales of the checkpoint per {per}"


def kv_format(
    config: ModelConfig,
    of_checkpoint: KVScales | None = None,
    dtype: str = AUTO,
    scales: ScaleKind | None = None,
) -> KVFormat:
    """Return the format of a model's cache.

    Args:
        config: shape of the model.
        of_checkpoint: what the checkpoint says of an 8-bit cache.
        dtype: "auto", which is the checkpoint's 8 bits, or else the model's dtype; "fp8" or "int8";
            or the name of the model's dtype, whatever the checkpoint says.
        scales: of 8 bits. None: those of the checkpoint where it is made for this dtype, and else
            one per token and head. An FP8 checkpoint without scales is one of static scales of 1.

    Raises:
        ValueError: naming `kv_cache_dtype` or `kv_scales`, as `Engine` calls them, for a name that
            is none, another 16- or 32-bit dtype than the model's, scales that do not go with the
            dtype, and static scales of INT8 that the checkpoint does not have.
    """
    if not isinstance(dtype, str) or dtype not in (AUTO, *KV_DTYPES):
        known = ", ".join(map(repr, (AUTO, *KV_DTYPES)))
        raise ValueError(f"kv_cache_dtype: got {dtype!r}, expected one of {known}")
    if scales is not None and scales not in SCALE_KINDS:
        raise ValueError(f"kv_scales: got {scales!r}, expected None, 'static' or 'token'")
    if dtype == AUTO:
        chosen = config.dtype if of_checkpoint is None else of_checkpoint.dtype
    else:
        chosen = KV_DTYPES[dtype]
    if chosen not in (config.dtype, *_EIGHT_BITS):
        raise ValueError(
            f"kv_cache_dtype: got {dtype!r}, expected 'auto', 'fp8', 'int8' or the model's "
            f"{_NAMES[config.dtype]!r}"
        )
    if chosen not in _EIGHT_BITS:
        if scales is not None:
            raise ValueError(f"kv_scales: got {scales!r}, expected None for pages of {chosen}")
        return KVFormat(chosen)
    of_dtype = of_checkpoint if of_checkpoint and of_checkpoint.dtype is chosen else None
    has_scales = of_dtype is not None and of_dtype.k is not None
    if scales is None:
        as_they_are = of_dtype is not None and chosen is torch.float8_e4m3fn
        scales = "static" if has_scales or as_they_are else "token"
    if scales == "token":
        return KVFormat(chosen, "token")
    if of_dtype is not None and has_scales:
        return KVFormat(chosen, "static", of_dtype.k, of_dtype.v)
    if chosen is torch.int8:
        # By 1 a cache would hold integers, and next to nothing of keys and values of order one.
        raise ValueError(
            "kv_scales: got 'static', but the checkpoint has no scales of an INT8 cache; expected "
            "'token'"
        )
    return KVFormat(chosen, "static")
