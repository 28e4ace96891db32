"""Runs a benchmark of the harness: its common flags, the peers, the cases."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..budget import Budget, add_budget_flag
from ..command import FAILED, UserError, user_errors
from ..device import add_device_flag, resolve_device
from .output import Output, add_json_flag, add_peers_flag, add_targets_flag
from .picture import add_plot_flag, check_plot_flag, plot

if TYPE_CHECKING:
    import torch

    from ...bench.harness.benchmark import Benchmark, Implementation
    from ...bench.harness.results import CaseResult
    from ...bench.harness.rotation import Pace

_CaseT = TypeVar("_CaseT")


def add_run_flags(parser: argparse.ArgumentParser, peers: str) -> None:
    """Add the flags of every benchmark of the harness.

    Args:
        parser: of the section.
        peers: names of the peers, and what each is, for --help.
    """
    parser.add_argument(
        "--peer",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"{peers}; all that are installed and that ours are compared with (default) or none",
    )
    add_peers_flag(parser)
    add_targets_flag(parser)
    add_budget_flag(parser, "case")
    add_json_flag(parser)
    add_plot_flag(parser)
    add_device_flag(parser)


def run(
    args: argparse.Namespace,
    benchmark: Benchmark,
    cases: Sequence[_CaseT],
    ours: Sequence[Implementation],
    *,
    expand: Callable[[Implementation], Sequence[Implementation]] = lambda peer: [peer],
    rivals_alone: bool = False,
    environ: Mapping[str, str] | None = None,
    required: bool = False,
    pace: Pace | None = None,
    prepare: Callable[[torch.device], object] = lambda device: None,
) -> int:
    """Time ours and the peers in all cases, print and write the results; return the exit code.

    Args:
        args: with the flags of `add_run_flags`.
        benchmark: what to run.
        cases: what is computed.
        ours: our implementations.
        expand: returns the implementations of a peer that this run times.
        rivals_alone: whether "all" peers are those alone that one of ours is compared with.
        environ: what adapters read instead of the process's environment.
        required: whether each peer is needed, as if it were asked for by name.
        pace: of the timing; that of a card at rest by default.
        prepare: called with the device before anything is timed.
    """
    check_plot_flag(args.plot)
    budget = Budget(args.budget_s, time.monotonic())

    import torch

    from ...bench.harness.peers import adapter_folder, find_peers
    from ...bench.harness.rotation import RESTED
    from ...bench.harness.runner import time_cases
    from ...bench.harness.summary import read_targets

    with user_errors():
        device = resolve_device(args.device)
        targets = None
        if args.targets is not None:
            targets = read_targets(args.targets, benchmark.section, benchmark.parse)
    environ = os.environ if environ is None else environ
    with user_errors(ValueError):
        known = find_peers(benchmark, adapter_folder(args.peers, environ), environ, expand)
    output = Output(args.json, device)
    is_rival = benchmark.summary.rivals
    every = [
        name
        for name in known
        if not rivals_alone or any(is_rival(impl.name, name) for impl in ours)
    ]
    asked = {"all": every, "none": []}.get(" ".join(args.peer), args.peer)
    required = required or asked is args.peer
    impls = [*ours, *ready_peers(asked, known, output, required=required)]
    prepare(device)
    with user_errors(OSError, MemoryError, torch.OutOfMemoryError):
        results = time_cases(benchmark, cases, impls, device, pace=pace or RESTED)
        left = _measure(cases, results, budget, output)
    output.finish(benchmark, targets, left)
    plot(args.plot, benchmark.section, output.report)
    return FAILED if output.failures else 0


def ready_peers(
    asked: Sequence[str],
    known: Mapping[str, list[Implementation]],
    output: Output,
    *,
    required: bool,
) -> list[Implementation]:
    """Return the peers of these names, less those that are not installed.

    Args:
        asked: names.
        known: the implementations of every peer, by its name.
        output: says which are not timed, and records the versions of the others.
        required: whether all have to be installed.

    Raises:
        UserError: for an unknown name, and for a peer that is required and not installed.
    """
    from ...bench.harness.peers import select

    try:
        found = select(asked, known)
    except ValueError as error:
        raise UserError(f"--peer: {error}") from error
    ready = []
    for peer in found:
        try:
            peer.prepare()
        except Exception as error:  # whatever goes wrong when somebody else's package is imported
            if required:
                raise UserError(f"{peer.name}: {error}") from error
            output.say(f"{peer.name} is not timed: {error}")
        else:
            ready.append(peer)
            output.record(peer)
    return ready


def _measure(
    cases: Sequence[_CaseT],
    results: Iterator[CaseResult],
    budget: Budget,
    output: Output,
) -> Sequence[_CaseT]:
    """Take the results of the cases, and return those for which no time was left.

    Args:
        cases: what is computed.
        results: times the next case each time it is asked.
        budget: of time.
        output: gets each result as it comes.
    """
    for done in range(len(cases)):
        if not budget.allows_another():
            return cases[done:]
        output.add(next(results))
    return []
