"""The printed lines of `bench`, and the document that grows with every case."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..command import UserError, check_folder, user_errors

if TYPE_CHECKING:
    import torch

    from ...bench.harness.benchmark import Benchmark, Implementation
    from ...bench.harness.results import CaseResult
    from ...bench.harness.summary import Summary

_NAMED = 20  # of what is listed in one line
_PRINTED = ".txt"  # suffix of what is printed
Times = Mapping[Any, Mapping[str, float]]  # by case, by implementation


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="F",
        help=f"write the times to this file, and what is printed to F with {_PRINTED} for its "
        "suffix",
    )


def check_json_flag(path: Path | None) -> None:
    """Check that the file of --json can be made, and is not that of the printed lines."""
    check_folder("--json", path)
    if path is not None and path.suffix == _PRINTED:
        raise UserError(
            f"--json: got {path}, expected another suffix than {_PRINTED}, "
            "the one of what is printed"
        )


def add_targets_flag(parser: argparse.ArgumentParser) -> None:
    """Add --targets."""
    parser.add_argument(
        "--targets", type=Path, metavar="F", help="compare with the peers' times in this file, too"
    )


def add_peers_flag(parser: argparse.ArgumentParser) -> None:
    """Add --peers."""
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="DIR",
        help="folder with the adapters of other libraries (default: OSTINATO_BENCH_PEERS, or "
        "examples/bench_peers of the source tree that this package is imported from)",
    )


class Output:
    """The lines and rows of a run.

    Args:
        json: file of --json.
        device: where it is measured.
    """

    def __init__(self, json: Path | None, device: torch.device) -> None:
        from ...bench.report import Report

        self.failures = 0
        self._json = json
        self.report = Report.for_device(device)
        self._lines: list[str] = []
        self.say(f"{self.report.gpu}, commit {self.report.commit or 'unknown'}")

    def say(self, *lines: str) -> None:
        """Print lines."""
        self._lines += lines
        print(*lines, sep="\n", flush=True)

    def record(self, peer: Implementation) -> None:
        """Note the version of a peer's package in the document."""
        if peer.package is not None and peer.version is not None:
            self.report.versions[peer.package] = peer.version

    def add(self, result: CaseResult[Any]) -> None:
        """Print what was found in a case, and write it."""
        times = " ".join(f"{row.impl} {row.us:.2f}" for row in result.rows)
        self.say(f"{result.case!s:<24} {times or 'nothing'}")
        for impl, reason in result.unsupported.items():
            self.say(f"{result.case!s:<24} {impl} cannot: {reason}")
        for impl, reason in result.failures.items():
            self.say(f"{result.case!s:<24} {impl} FAILED: {reason}")
        self.failures += len(result.failures)
        self.report.rows += result.rows
        # After every case: what was measured before a Ctrl-C is worth keeping.
        if self._json is not None:
            self.report.write(self._json)

    def finish(self, benchmark: Benchmark, targets: Times | None, left: Sequence[object]) -> None:
        """Print how our times compare with the peers', and write what was printed.

        Args:
            benchmark: that was run.
            targets: the peers' published times.
            left: cases for which there was no time.
        """
        summary = benchmark.summary.lines
        measured = self._compare(benchmark.summary, benchmark.parse)
        if targets is not None:
            self.say("", "== against the targets (µs)", *summary(measured, targets))
            # A mean over some of them must not pass for one over all.
            if missing := sorted(set(targets) - set(measured)):
                count = f"{len(missing)} of {len(targets)}"
                named = ", ".join(map(str, missing[:_NAMED]))
                more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
                self.say("", f"targets not measured: {count}: {named}{more}")
        if left:
            names = ", ".join(map(str, left))
            self.say("", f"not measured, since the budget was spent: {names}")
        self._write_printed()

    def finish_rows(self, summary: Summary, parse: Callable[[str], Any]) -> None:
        """Print how our times compare with the peers', and write what was printed.

        Args:
            summary: how they are compared.
            parse: returns the case that a row spells.
        """
        self._compare(summary, parse)
        self._write_printed()

    def _compare(self, summary: Summary, parse: Callable[[str], Any]) -> Times:
        """Print how our times compare with the peers'; return all times."""
        from ...bench.harness.summary import times
        from ...bench.report import Row

        measured = times([row for row in self.report.rows if isinstance(row, Row)], parse)
        lines = summary.lines(measured, measured)
        self.say("", "== against the peers of this run (µs)", *lines)
        return measured

    def _write_printed(self) -> None:
        from ...jit.files import write_whole

        if self._json is not None:
            text = "\n".join([*self._lines, ""])
            with user_errors(OSError):
                write_whole(self._json.with_suffix(_PRINTED), text)
