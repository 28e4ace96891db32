"""`env`: what a bug report needs to say about the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any

from ..jit.targets import target_named
from .command import Command, Parser, user_errors

_SECRETS = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_PREFIXES = ("OSTINATO_", "CUDA_", "NVIDIA_", "NCCL_", "PYTORCH_", "TORCH_", "OMP_", "MKL_")


def describe(archs: Sequence[str] = ()) -> dict[str, Any]:
    """Return software, hardware and settings in a form that JSON can hold.

    Args:
        archs: names of GPUs (see `ostinato.jit.targets`) of which to say what ops run on; by
            default those of this machine.

    Raises:
        ValueError: for a name that is none, or an OSTINATO_CAPABILITY that is refused.
    """
    import torch

    from ..bench import machine
    from ..ops.implementations import implementations, implementations_on

    if archs:
        targets = map(target_named, archs)
        ops = {str(target): implementations(target.capability, target) for target in targets}
    else:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        ops = {str(device): implementations_on(device) for device in devices}

    return {
        "versions": machine.versions(),
        "cuda": {
            "built_for": torch.version.cuda,
            "available": torch.cuda.is_available(),
        },
        "gpus": [f"{gpu.name}, {gpu.memory}, driver {gpu.driver}" for gpu in machine.gpus()],
        "ops": ops,
        "cpu": {
            "model": machine.cpu_model(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "memory_mib": machine.memory_mib(),
        },
        "os": platform.platform(),
        "python": sys.executable,
        "location": str(machine.location()),
        "commit": machine.commit(),
        "environment": {
            name: "(set)" if _SECRETS.search(name) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES)
        },
    }


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato env",
        usage="python -m ostinato env [--arch A ...] [--json]",
        description="Print versions, hardware and settings, to be pasted into a bug report.",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        default=[],
        metavar="A",
        help="say what ops run on for these GPUs, as of `build --arch` (default: this machine's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    with user_errors():
        found = describe(args.arch)
    print(json.dumps(found, indent=2) if args.json else "\n".join(_lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in found.items():
        if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
            lines += _lines({f"{name} on {key}": item for key, item in value.items()})
        elif isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {_text(item)}" for key, item in value.items())]
        elif isinstance(value, list):
            lines += [f"{name}:", *(f"  {item}" for item in value)]
        else:
            lines.append(f"{name}: {_text(value)}")
        if lines[-1] == f"{name}:":
            lines[-1] += " none"
    return lines


def _text(value: object) -> str:
    return "none" if value is None else str(value)


COMMAND = Command("print what a bug report needs", _main)
