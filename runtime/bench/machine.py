"""The machine, the software and the commit that a number was measured with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import ostinato

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")
_TIMEOUT_S = 10


@dataclass(frozen=True)
class Gpu:
    """A GPU as the NVIDIA driver lists it."""

    name: str
    memory: str
    driver: str


def gpus() -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists, whether or not torch can use them."""
    query = "--query-gpu=name,memory.total,driver_version"
    listing = _output("nvidia-smi", query, "--format=csv,noheader") or ""
    return [Gpu(*line.split(", ")) for line in listing.splitlines() if line.count(", ") == 2]


def cpu_model() -> str:
    """Return the processor's name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_mib() -> int:
    """Return the size of the main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def versions() -> dict[str, str | None]:
    """Return the versions of Python, ostinato and its dependencies; None for what is missing."""
    own = {"ostinato": ostinato.__version__, "python": platform.python_version()}
    return {**own, **package_versions(*PACKAGES)}


def package_versions(*names: str) -> dict[str, str | None]:
    """Return the versions of packages; None for what is missing."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def location() -> Path:
    """Return the folder that the package is imported from."""
    return Path(ostinato.__file__).resolve().parent


def commit() -> str | None:
    """Return the git commit of the checkout that the package is imported from, if it is one.

    "-dirty" follows the hash when tracked files have changes. `OSTINATO_COMMIT` says it for a
    copy of the source tree whose `.git` is missing or empty.
    """
    top = _output("git", "-C", str(location()), "rev-parse", "--show-toplevel")
    # A virtual environment may lie in somebody else's repository, whose commit says nothing.
    if top is None or not _same_file(Path(top, "runtime", "__init__.py"), ostinato.__file__):
        return os.environ.get("OSTINATO_COMMIT")
    described = _output(
        "git", "-C", top, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )
    return described or os.environ.get("OSTINATO_COMMIT")


def _same_file(path: Path, other: str) -> bool:
    return path.exists() and path.samefile(other)


def _output(program: str, *arguments: str) -> str | None:
    """Return what a program prints, or None when it is missing, fails or hangs."""
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
