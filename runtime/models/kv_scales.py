"""What a checkpoint says of a KV cache in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
