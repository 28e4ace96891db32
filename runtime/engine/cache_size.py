"""How much memory there is for what an engine keeps, and how large a KV cache is by default."""

from __future__ import annotations

import torch

from ..jit.resources import available_memory
from ..models import Decoder
from ..models.l2.partitioned_memory import free_unused, rounding

_CPU_CACHE_BYTES = 4 << 30


def page_bytes(model: Decoder, page_size: int) -> int:
    """Return the bytes of one page of the KV cache, over all layers."""
    config = model.config
    return 2 * config.num_layers * page_size * config.kv_size * config.dtype.itemsize


def default_pages(
    model: Decoder, wanted: int, page_size: int, *, memory_fraction: float = 0.8
) -> int:
    """Return how many pages there is room for, the dummy page included: as many as wanted at most.

    Args:
        model: whose keys and values they hold.
        wanted: pages without the dummy page.
        page_size: tokens per page.
        memory_fraction: of a GPU's free memory that may be taken; of the host's it is 4 GiB.

    Raises:
        ValueError: when there is no room for one.
    """
    each = page_bytes(model, page_size)
    if model.device.type == "cuda":
        free_unused()
        free, _ = torch.cuda.mem_get_info(model.device)
        budget = int(free * memory_fraction)
        budget -= rounding(model.config.num_layers, budget)
    else:
        budget = min(_CPU_CACHE_BYTES, available_memory())
    if budget < each:
        raise ValueError(
            f"num_pages: got None, but {budget} bytes of memory hold no page of {each} bytes"
        )
    return 1 + min(wanted, budget // each)


def check_room(name: str, count: int, each: int, device: torch.device) -> None:
    """Check that there may be memory for something, before any of it is taken.

    Args:
        name: of the argument that says how many.
        count: how many.
        each: bytes of one, at least.
        device: whose memory it takes.

    Raises:
        ValueError: naming the argument and how many fit.
    """
    if device.type == "cuda":
        free_unused()
        free, _ = torch.cuda.mem_get_info(device)
        # torch keeps some of what was freed.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = available_memory()
    if count * each > free:
        raise ValueError(
            f"{name}: got {count}, expected at most {free // each}: each takes {each} bytes, and "
            f"{free} bytes of memory are free on {device}"
        )
