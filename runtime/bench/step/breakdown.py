"""The time of a decode step, kernel by kernel."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

_REPLAYS = 5

ATTENTION = "attention"
_PRODUCT_KERNELS = {"tiled_gemm", "small_m_gemm", "fused_linear", "activated_linear"}
_EXPERTS_KERNEL = "moe_linear"
_ATTENTION_KERNEL = "paged_decode"
# What `run` stages inputs that are on the device with, before the graph: torch._foreach_copy_.
_STAGING_KERNEL = "multi_tensor_apply_kernel"
_STAGING = "inputs"


@dataclass(frozen=True)
class Span:
    """A kernel or copy on the device: its name without arguments, and when it ran, in µs."""

    begin: float
    end: float
    name: str


@dataclass
class KernelShare:
    """The time that all launches of one kind take of one step.

    With programmatic launches kernels overlap, and one runs while it waits for another: the times
    that they run sum up to more than the step. What each adds, from the end of the kernel that
    ended before it to its own, sums up to the step.

    Args:
        name: the kernel's, or what it does in the step (`sites_of`).
        launches: of a step.
        added_us: microseconds that the step would seem to gain without it.
        running_us: microseconds from the beginnings to the ends of its launches.
    """

    name: str
    launches: int = 0
    added_us: float = 0.0
    running_us: float = 0.0


def trace(step: Callable[[], object]) -> list[list[Span]]:
    """Return the kernels and copies of some runs of a step on CUDA, in the order of their starts.

    The profiler slows the step down a little; what it says is about proportions.

    Raises:
        RuntimeError: when not all runs launch the same.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_REPLAYS):
            step()
        torch.cuda.synchronize()
    spans = sorted(
        (
            Span(event.time_range.start, event.time_range.end, short_name(event.name))
            for event in profile.events()
            if event.device_type.name == "CUDA"
        ),
        key=lambda span: span.begin,
    )
    each, rest = divmod(len(spans), _REPLAYS)
    if rest:
        raise RuntimeError(f"{_REPLAYS} runs of the step launched {len(spans)} kernels and copies")
    return [spans[run * each : (run + 1) * each] for run in range(_REPLAYS)]


def short_name(name: str) -> str:
    """Return a kernel's name without types, namespaces and arguments."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    if plain.startswith(("Memcpy", "Memset")):
        return plain.partition(" ")[0].lower()
    return plain.partition("(")[0].partition("<")[0].rpartition("::")[2]


def sites_of(
    names: Sequence[str], layers: int, linears: Sequence[str], experts: Sequence[str] = ()
) -> list[str]:
    """Return what each kernel of a decode step of ours does, by the order of their launches.

    Products, attention and the staging of inputs, which is no part of the graph, have names of
    their own; others have the kernel's, and which of those they come before. A step of other
    kernels is left with their names.

    Args:
        names: of the kernels and copies of one step, in order (`short_name`).
        layers: of the model.
        linears: the names of its linear layers, in order; the last is the output projection.
        experts: likewise of its grouped products.
    """
    products = [index for index, name in enumerate(names) if name in _PRODUCT_KERNELS]
    grouped = [index for index, name in enumerate(names) if name == _EXPERTS_KERNEL]
    attentions = [index for index, name in enumerate(names) if name == _ATTENTION_KERNEL]
    # The output projection may be another library's.
    if len(attentions) != layers or len(linears) - len(products) not in (0, 1):
        return list(names)
    if len(grouped) != len(experts):
        return list(names)
    sites = list(names)
    for index in attentions:
        sites[index] = ATTENTION
    for index, site in (
        *zip(products, linears, strict=False),
        *zip(grouped, experts, strict=True),
    ):
        sites[index] = site
    named = {*products, *grouped, *attentions}
    following = ""
    for index in reversed(range(len(sites))):
        if index in named:
            following = sites[index]
        elif names[index] == _STAGING_KERNEL:
            sites[index] = _STAGING
        elif following:
            sites[index] = f"{names[index]} ({following})"
    return sites


def shares_of(runs: Sequence[Sequence[Span]], sites: Sequence[str]) -> list[KernelShare]:
    """Return what the kernels of each site take of a step, the largest first.

    Args:
        runs: of the same kernels, each in the order of their starts; medians are taken of each.
        sites: the kernels' names, which may repeat.
    """
    added = [_added(run) for run in runs]
    shares: dict[str, KernelShare] = {}
    for index, site in enumerate(sites):
        share = shares.setdefault(site, KernelShare(site))
        share.launches += 1
        share.added_us += statistics.median(times[index] for times in added)
        share.running_us += statistics.median(run[index].end - run[index].begin for run in runs)
    return sorted(shares.values(), key=lambda share: -share.added_us)


def _added(run: Iterable[Span]) -> list[float]:
    """Return by how much each kernel ends later than all that ended before it."""
    spans = list(run)
    added = [0.0] * len(spans)
    last: float | None = None
    for index in sorted(range(len(spans)), key=lambda index: spans[index].end):
        span = spans[index]
        added[index] = max(0.0, span.end - (span.begin if last is None else last))
        last = span.end
    return added
