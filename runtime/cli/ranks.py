"""Commands under torchrun: every process runs the command, and rank 0 alone is heard."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import rank_environment
from .command import UserError, user_errors
from .device import resolve_device

if TYPE_CHECKING:
    import torch

    from ..ops import Communicator
    from ..parallel import Ranks

DEFAULT_TIMEOUT_S = 60.0


def world_size() -> int:
    """Return how many processes torchrun has started; 1 without it.

    Raises:
        UserError: when the environment holds no number above 0.
    """
    with user_errors(ValueError):
        return rank_environment.world_size()


def is_heard() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def have_met() -> bool:
    """Whether the ranks have come together, so that rank 0 hears of an error of this one."""
    return _met


_met = False


def add_rank_flags(parser: argparse._ActionsContainer) -> None:
    """Add --tensor-parallel-size and --group-timeout."""
    parser.add_argument(
        *("--tensor-parallel-size", "-tp", "--tp"),
        type=int,
        metavar="N",
        help="GPUs that share the model: as many processes as torchrun starts (default: all)",
    )
    parser.add_argument(
        "--group-timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds within which all processes end when one is lost (default 60)",
    )


@contextmanager
def ranks_of(args: argparse.Namespace) -> Iterator[Ranks | None]:
    """Yield the processes that torchrun has started; None for one alone.

    Raises:
        UserError: when they are not as many as --tensor-parallel-size says.
    """
    global _met
    size, wanted = world_size(), args.tensor_parallel_size
    if wanted is not None and wanted < 1:
        raise UserError(f"--tensor-parallel-size: got {wanted}, expected at least 1")
    if wanted is not None and wanted != size:
        raise UserError(
            f"--tensor-parallel-size: got {wanted}, expected {size}, the number of processes: "
            f"start {wanted} by torchrun --nproc-per-node {wanted} -m ostinato ..."
        )
    if size == 1:
        yield None
        return
    from ..parallel import start_ranks

    if not args.group_timeout > 0:
        raise UserError(f"--group-timeout: got {args.group_timeout}, expected more than 0")
    with user_errors(ValueError):
        ranks = start_ranks(device_of(args, several=True), timeout_s=args.group_timeout)
    _met = True
    with ranks:
        yield ranks


def device_of(args: argparse.Namespace, *, several: bool | None = None) -> torch.device:
    """Return the device of this process: of several, each has a GPU of its own.

    Raises:
        ValueError: for a --device that is not here, or one GPU for several processes.
    """
    several = world_size() > 1 if several is None else several
    if not several or args.device == "cpu":
        return resolve_device(args.device)
    import torch

    if args.device not in (None, "cuda"):
        raise ValueError(
            f"--device: got {args.device!r}, expected cuda or cpu: each process has its own GPU"
        )
    if args.device is None and not torch.cuda.is_available():
        return torch.device("cpu")
    return resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")


def communicator_of(ranks: Ranks | None, device: torch.device) -> Communicator | None:
    """Return what a model's layers sum over ranks with; None for one process."""
    return None if ranks is None else ranks.connect(device)
