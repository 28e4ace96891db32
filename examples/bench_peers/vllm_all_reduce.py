"""vLLM's custom all-reduce between GPUs of one host; vLLM takes it for sums of less than 8 MiB.

In a graph it reads the rows where they are, once the graph's addresses have been exchanged, as it
does in vLLM's own graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import distributed

from ostinato.bench.all_reduce.cases import Case
from ostinato.bench.all_reduce.impls import Inputs, Sums, followed
from ostinato.bench.harness.rotation import Call


def peers(section: str, environ: Mapping[str, str]) -> list[Sums]:
    """Return the implementation for `bench all-reduce`."""
    return [Sums("vllm_custom", _bind, capturing=_capturing)] if section == "all_reduce" else []


@cache
def _custom() -> Any:
    """Return vLLM's communicator, a collective of all ranks."""
    group = distributed.new_group(backend="gloo")
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError as error:
        raise RuntimeError(f"vllm: {error}") from error
    return CustomAllreduce(group, torch.device("cuda", torch.cuda.current_device()))


def _bind(case: Case, s: Inputs) -> Call:
    ranks = _custom()
    if not ranks.should_custom_ar(s.x):
        raise ValueError(f"vLLM does not take it for {s.x.nbytes} bytes")

    def call() -> tuple[torch.Tensor, ...]:
        is_captured = torch.cuda.is_current_stream_capturing()
        return followed(case, s, ranks.all_reduce(s.x, registered=is_captured))

    return call


@contextmanager
def _capturing() -> Iterator[None]:
    with _custom().capture():
        yield
