"""Tells whether a tensor holds nothing but numbers."""

from __future__ import annotations

import torch

_E4M3_NAN = 0x7F  # e4m3fn has no infinities, and NaN is this code with either sign


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is NaN or an infinity.

    Args:
        tensor: not empty, of a 16- or 32-bit floating-point dtype, int8 or float8_e4m3fn. It is
            read once, and only for e4m3 is memory of its size needed.
    """
    if tensor.dtype is torch.int8:
        return True
    if tensor.dtype is torch.float8_e4m3fn:
        magnitudes = tensor.view(torch.uint8) & _E4M3_NAN
        return int(magnitudes.max()) != _E4M3_NAN
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
