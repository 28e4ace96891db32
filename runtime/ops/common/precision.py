"""The switches of torch that let fp32 matrix products lose precision."""

from __future__ import annotations

import torch

_FULL = ("none", "ieee")
_PER_BACKEND = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # from torch 2.9 on


def full_precision(device: torch.device) -> None:
    """Check that fp32 matrices are multiplied in fp32 on `device`, not in TF32 or bf16.

    Torch's switches hold for the whole process: to turn them for a call would also turn them for
    the other threads' calls.

    Raises:
        RuntimeError: naming the switch, what it is set to, and the remedy.
    """
    if not _PER_BACKEND:
        name, got = "torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision()
        full = got == "highest"
    elif device.type == "cpu":
        name = "torch.backends.mkldnn.matmul.fp32_precision"
        got = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        full = got in _FULL
    else:
        name = "torch.backends.cuda.matmul.fp32_precision"
        got = torch.backends.cuda.matmul.fp32_precision
        full = got in _FULL
    if not full:
        raise RuntimeError(
            f"{name}: got {got!r}, expected fp32 products of fp32 matrices; "
            'call torch.set_float32_matmul_precision("highest")'
        )
