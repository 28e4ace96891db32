"""What a checkpoint says of a KV cache in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .modules import share


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
