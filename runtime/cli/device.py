"""The --device flag."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_DEVICE = re.compile("cpu(:0)?|cuda(:(0|[1-9][0-9]{0,2}))?", re.ASCII)


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda when available)"
    )


def resolve_device(name: str | None) -> torch.device:
    """Return the device that the flag asks for.

    Raises:
        ValueError: when there is no such device here.
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if _DEVICE.fullmatch(name) is None:
        raise ValueError(f"--device: got {name!r}, expected cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device: got {name!r}, but torch finds {torch.cuda.device_count()} CUDA devices"
        )
    return device
