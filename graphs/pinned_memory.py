"""Pinned memory of the host as the GPU's own kernels see it.

A copy by the driver goes to a copy engine, whose turn on a stream takes 5 to 10 µs beside the 1 to
3 µs of a small copy: kernels in front of it and behind it wait for the engine and it for them. A
kernel that reads or writes the host's memory itself has its place between them like any other.
"""

from __future__ import annotations

from typing import Any

import torch


class _Exported:
    """Memory under the protocol by which torch takes that of others, and keeps it alive."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(words.shape),
            "typestr": "<i8",
            "data": (words.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def pinned_words(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return new pinned memory twice: as a tensor of the host, and as one of a CUDA device.

    Kernels of the device reach it over the bus. What they write, the host may read once it has
    waited for them; what the host writes is read by kernels that are launched after.

    Args:
        size: 64-bit integers; they are zero at first.
        device: a CUDA device with its index.

    Returns:
        Two int64 tensors [size] of the same memory, each of which keeps it alive. The second is
        None where torch takes the memory for that of another GPU, which used it before.
    """
    # Made in inference mode they could not be written outside it.
    with torch.inference_mode(False), torch.cuda.device(device):
        words = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=True)
        mapped = torch.as_tensor(_Exported(words), device=device)
    return words, mapped if mapped.data_ptr() == words.data_ptr() else None
