"""The flag `--plot` of every section of `bench`."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ..command import UserError, check_folder, user_errors

if TYPE_CHECKING:
    from ...bench.report import Report

_SUFFIX = ".svg"


def add_plot_flag(parser: argparse.ArgumentParser) -> None:
    """Add --plot."""
    parser.add_argument(
        "--plot",
        type=Path,
        metavar=f"F{_SUFFIX}",
        help="draw the times by case in this file (needs matplotlib: pip install ostinato[plot])",
    )


def check_plot_flag(path: Path | None) -> None:
    """Check that the picture of --plot can be drawn and written, before anything is measured."""
    if path is None:
        return
    if path.suffix != _SUFFIX:
        raise UserError(f"--plot: got {path}, expected a file that ends in {_SUFFIX}")
    check_folder("--plot", path)
    check_matplotlib("--plot")


def check_matplotlib(flag: str) -> None:
    """Check that what `flag` draws with is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{flag}: matplotlib is not installed (pip install ostinato[plot])")


def plot(path: Path | None, section: str, report: Report) -> None:
    """Draw the rows of a report, if --plot names a file.

    Raises:
        UserError: when nothing was measured, or the picture cannot be written.
    """
    if path is None:
        return
    from ...bench.plot import draw_rows

    title = f"bench {section}, {report.gpu}, commit {report.commit or 'unknown'}"
    with user_errors():
        draw_rows(path, title, report.rows)
