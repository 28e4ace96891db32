"""FP8 (e4m3) values in torch: widening them, and moving them by operations that lack the dtype."""

from __future__ import annotations

import torch


def to_float32(x: torch.Tensor) -> torch.Tensor:
    """Return a fresh contiguous fp32 copy of x, of any dtype and with the last dimension dense."""
    if x.dtype is not torch.float8_e4m3fn or x.device.type != "cpu":
        return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    # torch widens FP8 one element at a time on the CPU. Shifted into place, the bits of an e4m3
    # number are those of an fp16 number 2^-8 times as large, subnormals included.
    bits = x.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
    bits <<= 7
    bits &= ~0x4000  # widening has repeated the sign in what is the exponent's highest bit
    bits |= (bits + 0x80) & 0x4000  # NaN alone carries into that bit, and so stays NaN
    return bits.view(torch.float16).float().mul_(256.0)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return x, or an int8 view of it for FP8, which torch's indexing does not take everywhere."""
    return x.view(torch.int8) if x.dtype is torch.float8_e4m3fn else x
