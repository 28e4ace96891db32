"""What a checkpoint says of a KV cache in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVScales:
    """Scales of keys and values in an 8-bit KV cache, which a checkpoint brings.

    Pages are in the model's dtype, and no step reads the scales.

    Args:
        dtype: int8 or float8_e4m3fn.
        k: [num_layers] fp32 on the CPU, the factor of each layer's stored keys; None where the
            checkpoint holds no scales.
        v: likewise of values.
    """

    dtype: torch.dtype
    k: torch.Tensor | None
    v: torch.Tensor | None

    def __str__(self) -> str:
        """Return what becomes of them."""
        kind = "INT8" if self.dtype is torch.int8 else "FP8"
        scales = "" if self.k is None else ", and its scales are not used"
        return f"pages in the model's dtype; the checkpoint asks for {kind}{scales}"
