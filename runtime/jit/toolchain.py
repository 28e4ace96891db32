"""Finds nvcc, ninja and the CUTLASS headers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from .errors import KernelBuildError
from .sources import CSRC

_INSTALL = "`pip install 'ostinato[cuda]'` brings it"
# `setup.py` puts them into the sdist, and so into the wheel.
PACKAGED_CUTLASS = CSRC / "third_party" / "cutlass"
INSTALL_CUTLASS = "install them with `pip install --no-deps nvidia-cutlass==4.2.0.0`"
# Where programs and their own libraries are found, and the language of messages.
_HARMLESS = (*("PATH", "LD_LIBRARY_PATH", "HOME"), *("LANG", "LC_ALL", "LC_CTYPE", "LC_MESSAGES"))
_VERSION = re.compile(r"release [\d.]+, V([\d.]+)")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler.

    Args:
        path: of the program.
        version: such as "13.0.88".
        host_compiler: the one that NVCC_CCBIN names, a program or its folder; None for nvcc's
            choice, the g++ of PATH.
    """

    path: Path
    version: str
    host_compiler: str | None = None

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


def compiler_environment() -> dict[str, str]:
    """Return the environment that compilers run in: the few variables that change no output.

    nvcc, the host compiler and the linker read dozens, from NVCC_APPEND_FLAGS and PTXAS_FLAGS to
    CPATH and LD_RUN_PATH. What decides about a library is in its command line, and so in its key.
    """
    return {name: os.environ[name] for name in _HARMLESS if name in os.environ}


def find_nvcc() -> Nvcc | None:
    """Return the first of the nvccs of CUDA_HOME, PATH and the PyPI packages; None without any.

    Raises:
        KernelBuildError: when it does not run.
    """
    path = _nvcc_path()
    if path is None:
        return None
    chosen = os.environ.get("NVCC_CCBIN") or None
    if chosen is not None and os.sep in chosen:
        chosen = os.path.abspath(chosen)  # compilers run in folders of their own
    return replace(_describe(path), host_compiler=chosen)


def find_cutlass() -> Cutlass | None:
    """Return the CUTLASS headers of a wheel or sdist of ours, or else those of `nvidia-cutlass`.

    A git checkout has no headers: it needs the PyPI package. None when that is not installed.
    """
    version = PACKAGED_CUTLASS / "version.txt"
    if version.is_file():
        return Cutlass(PACKAGED_CUTLASS / "include", version.read_text(encoding="utf-8").strip())
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
        raise KernelBuildError(f"the CUTLASS headers not found: {INSTALL_CUTLASS}")
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
            [path, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=60,
            env=compiler_environment(),
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(f"{path} does not run: {error}") from error
    match = _VERSION.search(text)
    if match is None:
        raise KernelBuildError(f"{path} --version: got {text!r}, expected nvcc's version")
    return Nvcc(path, match[1])
