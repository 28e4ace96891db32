"""Ranks that are processes of a gloo group, and what each of them computes."""

from __future__ import annotations

import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 240.0  # against hanging, on however slow a machine


def hold_store(port: int = 0) -> Any:
    """Return a store for ranks of this host, at a port, or at a free one.

    On its own socket, for both families of addresses, torch has the store wait for a name server
    whenever a rank connects.
    """
    listener = socket.create_server(("127.0.0.1", port), backlog=2048)
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]  # it is public
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def results_of_processes(
    size: int, function: Callable[..., Any], *args: object, preload: list[str]
) -> list[Any]:
    """Return what a function gives in each of `size` processes, in rank order.

    Args:
        size: how many ranks.
        function: of a module; gloo's group is torch's default one when it is called. Tensors are
            no results that a process may leave behind; NumPy's arrays are.
        args: of it.
        preload: modules that the processes are forked with.
    """
    starting = multiprocessing.get_context("forkserver")
    starting.set_forkserver_preload(preload)
    store = hold_store()
    results = starting.SimpleQueue()
    processes = [
        starting.Process(target=_work, args=(rank, size, store.port, results, function, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    told: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(told) < size:
            assert time.monotonic() < deadline, f"some ranks hang; until now {sorted(told)} told"
            if results.empty():
                time.sleep(0.02)
                continue
            rank, crash, found = results.get()
            assert crash is None, crash
            told[rank] = found
    finally:
        for process in processes:
            process.join(10 if len(told) == size else 0)
            process.kill()
            process.join()
    return [told[rank] for rank in range(size)]


def _work(
    rank: int, size: int, port: int, results: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    crash = found = None
    try:
        found = function(*args)
    except Exception:
        crash = traceback.format_exc()
    results.put((rank, crash, found))
    dist.destroy_process_group()
