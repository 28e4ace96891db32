"""The libraries of attention kernels that ours are compared with, loaded when asked for."""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

import torch

SGL_FLASH_LIBRARY = "OSTINATO_SGL_FLASH_LIBRARY"


@cache
def fa3() -> tuple[Any, tuple[None, ...]]:
    """Return FlashAttention-3's ops, and what `fwd` takes after its own package's arguments."""
    library = os.environ.get(SGL_FLASH_LIBRARY)
    if library is None:
        importlib.import_module("flash_attn_interface")
        return torch.ops.flash_attn_3, ()
    torch.ops.load_library(library)
    return torch.ops.sgl_kernel, (None,)  # attention sinks


@cache
def flashinfer() -> Any:
    """Return FlashInfer's package."""
    return importlib.import_module("flashinfer")
