"""What each process of the tests over gloo does, for forks of a server to import."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ostinato.ops.collective import peers
from ostinato.ops.collective.communicator import Communicator, GroupCommunicator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def share(rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank adds: sums in another order, or rounded twice, have other bits."""
    generator = torch.Generator().manual_seed(1000 * rank + width)
    scale = 10.0 ** torch.randint(-3, 4, (rows, width), generator=generator)
    return (torch.randn(rows, width, generator=generator) * scale).to(dtype)


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum as it is meant: fp32, element by element from rank 0 on, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def reduce_and_gather(communicator: Communicator) -> dict[str, Any]:
    """Return sums and concatenations of every dtype, and those of rows by themselves."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        x = share(communicator.rank, 5, 48, dtype)
        found[f"sum {dtype}"] = communicator.all_reduce(x)
        found[f"row {dtype}"] = communicator.all_reduce(x[3:4])
        found[f"columns {dtype}"] = communicator.all_gather(x[:, :7])
    return found


def work(rank: int, size: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        ranks = GroupCommunicator()
        told: dict[str, Any] = reduce_and_gather(ranks)
        told["numbers"] = torch.tensor(peers._of_all_ranks(ranks, [rank, 7]))
        told = {name: value.view(torch.uint8).numpy() for name, value in told.items()}
    except Exception:
        told = {"crashed": traceback.format_exc()}
    results.put((rank, told))
    dist.destroy_process_group()


def over_gloo(size: int) -> list[dict[str, Any]]:
    """Return what the ranks of `size` processes tell, as bytes, in rank order."""
    spawning = multiprocessing.get_context("forkserver")
    spawning.set_forkserver_preload(["ostinato.ops", "torch.distributed"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = spawning.SimpleQueue()
    processes = [
        spawning.Process(target=work, args=(rank, size, store.port, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    told: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 240
    try:
        while len(told) < size:
            assert time.monotonic() < deadline, f"some ranks hang; until now {list(told)} told"
            if results.empty():
                time.sleep(0.02)
                continue
            rank, found = results.get()
            assert "crashed" not in found, found["crashed"]
            told[rank] = found
    finally:
        for process in processes:
            process.join(5 if len(told) == size else 0)
            process.kill()
            process.join()
    return [told[rank] for rank in range(size)]
