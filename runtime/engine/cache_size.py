"""How much memory there is for what an engine keeps, and how large a KV cache is by default."""

from __future__ import annotations

import torch

from ostinato.graphs.arguments import as_integer

from ..jit.resources import available_memory
from ..models import KVFormat, ModelConfig
from ..models.l2.partitioned_memory import free_unused, rounding
from ..ops.attention.dequantize_kv import dequantized_bytes

MEMORY_FRACTION = 0.8
_CPU_CACHE_BYTES = 4 << 30


def page_bytes(config: ModelConfig, kv_format: KVFormat, page_size: int) -> int:
    """Return the bytes of one page of the KV cache, over all layers, scales included."""
    return config.num_layers * page_size * kv_format.token_bytes(config)


def default_pages(
    num_layers: int,
    each: int,
    wanted: int,
    device: torch.device,
    memory_fraction: float = MEMORY_FRACTION,
    beside: int = 0,
) -> int:
    """Return how many pages there is room for, the dummy page included: as many as wanted at most.

    Args:
        num_layers: of the model.
        each: bytes of a page, as `page_bytes` says.
        wanted: without the dummy page.
        device: of the cache.
        memory_fraction: of a GPU's free memory that may be taken; of the host's it is 4 GiB.
        beside: bytes of a GPU's memory that something else will take.

    Raises:
        ValueError: when there is no room for one.
    """
    if device.type == "cuda":
        free_unused()
        free, _ = torch.cuda.mem_get_info(device)
        budget = int((free - beside) * memory_fraction)
        budget -= rounding(num_layers, budget)
    else:
        budget = min(_CPU_CACHE_BYTES, available_memory())
    if budget < each:
        raise ValueError(
            f"num_pages: got None, but {budget} bytes of memory hold no page of {each} bytes"
        )
    return 1 + min(wanted, budget // each)


def check_memory_fraction(value: float) -> None:
    """Check a share of a GPU's free memory.

    Raises:
        ValueError: naming `memory_fraction`.
    """
    if not 0 < value <= 1:
        raise ValueError(f"memory_fraction: got {value}, expected a number in (0, 1]")


def checked_pages(
    config: ModelConfig,
    kv_format: KVFormat,
    page_size: int,
    device: torch.device,
    given: int | None,
    wanted: int,
    memory_fraction: float,
    max_tokens_k: int | None,
) -> int:
    """Return how many pages a cache has, `given` or by default, once there is room for them.

    The other arguments are those of `page_bytes` and `default_pages`; beside the cache
    `max_tokens_k` tokens of a layer are dequantised.

    Raises:
        TypeError, ValueError: naming `num_pages` or `memory_fraction`.
    """
    check_memory_fraction(memory_fraction)
    each = page_bytes(config, kv_format, page_size)
    if given is None:
        heads, dim = config.num_kv_heads, config.head_dim
        beside = 0 if max_tokens_k is None else dequantized_bytes(max_tokens_k, heads, dim, dim)
        given = default_pages(config.num_layers, each, wanted, device, memory_fraction, beside)
    count = as_integer("num_pages", given)
    check_room("num_pages", count, each, device)
    return count


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
