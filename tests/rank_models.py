"""Models that ranks divide, as threads of one process: the twins of those of several processes."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ostinato.checkpoint import load_model
from ostinato.models import Decoder, sequence_logits
from ostinato.ops.collective.communicator import (
    Communicator,
    GroupCommunicator,
    local_communicators,
    run_ranks,
)
from ostinato.ops.collective.peers import local_peers

TIMEOUT_S = 120.0  # against hanging, on however slow a machine


def load_ranks(
    folder: Path, size: int, device: torch.device | str = "cpu", **options: Any
) -> list[Decoder]:
    """Return the share of each rank of a checkpoint; options are those of `load_model`.

    Ranks on a GPU share it.
    """
    made = local_peers if torch.device(device).type == "cuda" else local_communicators
    ranks = made(size, timeout_s=TIMEOUT_S)
    return run_ranks(
        ranks, lambda rank: load_model(folder, device=rank.device, communicator=rank, **options)
    )


def rank_logits(models: Sequence[Decoder], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the logits that each rank computes."""
    by_rank = {model.communicator: model for model in models}

    def logits(rank: Communicator) -> torch.Tensor:
        with torch.inference_mode():
            if rank.device.type == "cpu":
                return sequence_logits(by_rank[rank], tokens)
            # Kernels that wait for those of other ranks are not in one stream with them.
            stream = torch.cuda.Stream(rank.device)
            with torch.cuda.stream(stream):
                found = sequence_logits(by_rank[rank], tokens)
            stream.synchronize()
            return found

    return run_ranks(list(by_rank), logits)


def logits_of_ranks(folder: Path, size: int, tokens: Sequence[int], **options: Any) -> torch.Tensor:
    """Return the logits that all ranks compute, once it is checked that they are equal."""
    first, *others = rank_logits(load_ranks(folder, size, **options), tokens)
    assert all(torch.equal(first, other) for other in others)
    return first


def logits_of_processes(folder: Path, size: int, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the logits of ranks that are processes, over gloo."""
    starting = multiprocessing.get_context("forkserver")
    starting.set_forkserver_preload(["rank_models"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = starting.SimpleQueue()
    processes = [
        starting.Process(target=_work, args=(rank, size, store.port, folder, tokens, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, torch.Tensor] = {}
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(found) < size:
            assert time.monotonic() < deadline, f"some ranks hang; {sorted(found)} have finished"
            if results.empty():
                time.sleep(0.02)
                continue
            rank, told = results.get()
            assert not isinstance(told, str), told
            found[rank] = torch.from_numpy(told)
    finally:
        for process in processes:
            process.join(10 if len(found) == size else 0)
            process.kill()
            process.join()
    return [found[rank] for rank in range(size)]


def _work(
    rank: int, size: int, port: int, folder: Path, tokens: Sequence[int], results: Any
) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        model = load_model(folder, communicator=GroupCommunicator())
        with torch.inference_mode():
            told: Any = sequence_logits(model, tokens).numpy()
    except Exception:
        told = traceback.format_exc()
    results.put((rank, told))
    dist.destroy_process_group()
