"""Finds nvcc, ninja and the CUTLASS headers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import KernelBuildError

_INSTALL = "`pip install 'ostinato[cuda]'` brings it"
_VERSION = re.compile(r"release [\d.]+, V([\d.]+)")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler and its version, such as "13.0.88"."""

    path: Path
    version: str

    @property
    def library_folders(self) -> list[Path]:
        """Folders of the static CUDA runtime that nvcc may not find by itself.

        The PyPI packages put it into `lib`, where their nvcc looks in `lib64`.
        """
        return [folder for folder in [self.path.parent.parent / "lib"] if folder.is_dir()]


@dataclass(frozen=True)
class Cutlass:
    """The headers of CUTLASS and their version, such as "4.2.0"."""

    include: Path
    version: str


def find_nvcc() -> Nvcc | None:
    """Return the first of the nvccs of CUDA_HOME, PATH and the PyPI packages; None without any.

    Raises:
        KernelBuildError: when it does not run.
    """
    path = _nvcc_path()
    return None if path is None else _describe(path)


def find_cutlass() -> Cutlass | None:
    """Return the CUTLASS headers of the PyPI package `nvidia-cutlass`, None when not installed."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        return None
    include = Path(spec.origin).parent / "source" / "include"
    return Cutlass(include, importlib.metadata.version("nvidia-cutlass"))


def find_ninja() -> Path:
    """Return the ninja of this Python environment, or else of PATH.

    Raises:
        KernelBuildError: when there is none.
    """
    # An environment's own programs are not on PATH unless it is activated.
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("ninja", path=folders)
    if found is None:
        raise KernelBuildError(f"ninja not found: {_INSTALL}")
    return Path(found)


def require_nvcc() -> Nvcc:
    """Return what `find_nvcc` finds.

    Raises:
        KernelBuildError: when there is none.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError(f"nvcc not found by CUDA_HOME, on PATH or from PyPI: {_INSTALL}")
    return nvcc


def require_cutlass() -> Cutlass:
    """Return what `find_cutlass` finds.

    Raises:
        KernelBuildError: when there is none.
    """
    cutlass = find_cutlass()
    if cutlass is None:
        raise KernelBuildError(f"the CUTLASS headers (nvidia-cutlass) not found: {_INSTALL}")
    return cutlass


def _nvcc_path() -> Path | None:
    # Where only the CUDA runtime is installed, CUDA_HOME is often set, too, and has no nvcc.
    of_home = Path(os.environ.get("CUDA_HOME", "")) / "bin" / "nvcc"
    if os.environ.get("CUDA_HOME") and os.access(of_home, os.X_OK):
        return of_home
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [path for root in roots for path in Path(root).glob("cu*/bin/nvcc")]
    return max(found, default=None)


@lru_cache
def _describe(path: Path) -> Nvcc:
    try:
        text = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(f"{path} does not run: {error}") from error
    match = _VERSION.search(text)
    if match is None:
        raise KernelBuildError(f"{path} --version: got {text!r}, expected nvcc's version")
    return Nvcc(path, match[1])
