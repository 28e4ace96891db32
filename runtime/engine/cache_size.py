"""How large a KV cache is for which nobody has said it."""

from __future__ import annotations

import torch

from ..models import Decoder
from ..models.l2.partitioned_memory import free_unused, rounding

_CPU_CACHE_BYTES = 4 << 30


def default_pages(model: Decoder, wanted: int, page_size: int) -> int:
    """Return how many pages there is room for, the dummy page included: as many as wanted at most.

    Of a GPU's free memory 80% may be taken, or 4 GiB of the host's.

    Raises:
        ValueError: when there is no room for one.
    """
    config = model.config
    page_bytes = 2 * config.num_layers * page_size * config.kv_size * config.dtype.itemsize
    if model.device.type == "cuda":
        free_unused()
        free, _ = torch.cuda.mem_get_info(model.device)
        budget = int(free * 0.8)
        budget -= rounding(config.num_layers, budget)
    else:
        budget = _CPU_CACHE_BYTES
    if budget < page_bytes:
        raise ValueError(
            f"num_pages: got None, but {budget} bytes of memory hold no page of {page_bytes} bytes"
        )
    return 1 + min(wanted, budget // page_bytes)
