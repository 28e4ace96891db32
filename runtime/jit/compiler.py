"""Compiles variants into the cache, and finds those compiled already."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import ninja
from .budgets import Usage, parse_ptxas
from .cache import LIBRARY, Entry, exclusive_build, file_sha256, publish
from .errors import KernelBuildError
from .installed import installed_folder
from .location import cache_folder
from .mode import RELEASE, BuildMode
from .sources import CSRC, ENTRY, Sources, digest, read_sources
from .targets import DEFAULT, Target
from .toolchain import Cutlass, Nvcc, find_cutlass, find_nvcc, require_cutlass, require_nvcc
from .variant import Variant

# -DNDEBUG: a device assert is a call, and ptxas serialises wgmma around calls.
_FLAGS = (
    *("-std=c++17", "-O3", "-DNDEBUG", "-shared", "-Xptxas", "-v"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden", "-cudart", "static", "-cudadevrt", "none"),
)
# Warning 20012 is about defaulted functions in CUTLASS's headers.
_CUTLASS_FLAGS = ("--expt-relaxed-constexpr", "-diag-suppress", "20012")
# Part of every key: to be raised when `Entry` changes, since old entries can not be read then.
_RECORD_FORMAT = "4"
_LOG_LINES = 20


@dataclass(frozen=True)
class Plan:
    """How a variant is compiled for a GPU in a mode, and the result's name less its toolchain."""

    variant: Variant
    target: Target
    mode: BuildMode
    sources: Sources
    flags: tuple[str, ...]

    @property
    def key(self) -> str:
        """Variant, target, and a hash of all texts and flags that the library depends on."""
        texts = (_RECORD_FORMAT, *self.flags, *self.sources.parts)
        return f"{self.variant.name}-{self.target}-{digest(texts)}"

    def folder(self, cache: Path, nvcc: Nvcc, cutlass: Cutlass | None) -> Path:
        """Return the folder of the library that this toolchain makes."""
        suffix = f"-cutlass{cutlass.version}" if cutlass is not None else ""
        if nvcc.host_compiler is not None:
            suffix += f"-ccbin{digest([nvcc.host_compiler])}"
        return cache / f"{self.key}-nvcc{nvcc.version}{suffix}"

    def command(self, nvcc: Nvcc, cutlass: Cutlass | None) -> list[str]:
        """Return the compiler's command line, as a `ninja.Job` has it."""
        includes = [CSRC, *([cutlass.include] if cutlass is not None else [])]
        return [
            str(nvcc.path),
            *(() if nvcc.host_compiler is None else ("-ccbin", nvcc.host_compiler)),
            *self.flags,
            *(f"-I{folder}" for folder in includes),
            *(str(self.variant.source), str(ENTRY), "-o", ninja.UNCHECKED),
            *(f"-L{folder}" for folder in nvcc.library_folders),
        ]


def plan(variant: Variant, mode: BuildMode = RELEASE, target: Target | None = None) -> Plan:
    """Read a variant's sources and settle its flags.

    Args:
        variant: which kernel.
        mode: release, or a build for debugging.
        target: the GPU to compile for; None for Hopper's, for which every variant is.

    Raises:
        FileNotFoundError: when its source is missing.
        ValueError: when the family has no kernels for the target.
    """
    sources = read_sources(variant.source)
    # A mode that changes nothing in this kernel must not cost another build of it.
    mode = mode.restricted_to(sources.own)
    defines = {**variant.defines(), **mode.defines()}
    target = target or DEFAULT
    if not variant.needs <= target.features:
        raise ValueError(
            f"target: got {target}, expected one for which {variant.family} has kernels"
        )
    flags = (
        *_FLAGS,
        *(_CUTLASS_FLAGS if sources.uses_cutlass else ()),
        *("-gencode", target.gencode),
        *(f"-D{name}={value}" for name, value in defines.items()),
    )
    return Plan(variant, target, mode, sources, flags)


def find(plan: Plan) -> Entry | None:
    """Return the compiled library of a plan, None when there is none.

    It is the one made by this machine's toolchain, else that of the package ostinato-kernels; on a
    machine that cannot compile, one made by any toolchain.

    Raises:
        KernelCacheError: when the cache has no place, or others than the user and root can change
            it or what would be found.
        KernelBuildError: when there is none, and this machine's nvcc, which might compile it, does
            not run.
    """
    cache = cache_folder()
    try:
        nvcc = find_nvcc()
    except KernelBuildError:
        made_by_any = _newest(cache, plan) or _installed(plan)
        if made_by_any is None and jit_enabled():
            raise
        return made_by_any
    cutlass = find_cutlass() if plan.sources.uses_cutlass else None
    can_compile = nvcc is not None and (cutlass is not None or not plan.sources.uses_cutlass)
    if nvcc is not None and can_compile:
        exact = Entry.read(plan.folder(cache, nvcc, cutlass))
        if exact is not None:
            return exact
    installed = _installed(plan)
    if installed is not None or (can_compile and jit_enabled()):
        return installed
    return _newest(cache, plan)


def damaged(plan: Plan) -> list[Path]:
    """Return the folders of a plan's entries, made by any toolchain, that are not whole.

    Raises:
        KernelCacheError: as of `find`.
    """
    folders = (folder for place in library_folders() for folder in _folders(place, plan))
    return [folder for folder in folders if Entry.read(folder) is None]


def library_folders() -> list[Path]:
    """Return the folders in which libraries are looked for: the cache, then the installed one.

    Raises:
        KernelCacheError: when the cache has no place.
    """
    installed = installed_folder()
    return [cache_folder(), *([] if installed is None else [installed])]


def _folders(cache: Path, plan: Plan) -> list[Path]:
    return sorted(cache.glob(f"{plan.key}-nvcc*"))


def _installed(plan: Plan) -> Entry | None:
    """Return the library of a plan that the package ostinato-kernels has."""
    folder = installed_folder()
    return None if folder is None else _newest(folder, plan)


def _newest(cache: Path, plan: Plan) -> Entry | None:
    """Return the last library of a plan that any toolchain has made."""
    entries = [Entry.read(folder) for folder in _folders(cache, plan)]
    whole = [entry for entry in entries if entry is not None]
    return max(whole, key=lambda entry: entry.made_ns, default=None)


def jit_enabled() -> bool:
    """Return whether a missing variant may be compiled on first use: unless OSTINATO_JIT=0."""
    return os.environ.get("OSTINATO_JIT", "1") != "0"


def build(
    plans: Sequence[Plan],
    *,
    jobs: int | None = None,
    report: Callable[[Entry], None] = lambda entry: None,
) -> list[Entry]:
    """Compile what this machine's toolchain has not compiled yet.

    Each library is in the cache as soon as it is finished, so that a build that is interrupted
    goes on where it was.

    Args:
        plans: what to compile; all must differ.
        jobs: how many compilers run at once; as cores and memory allow by default.
        report: called with each library as it is finished.

    Returns:
        The entries of all plans, in their order.

    Raises:
        KernelCacheError: as of `find`.
        KernelBuildError: when the toolchain is missing, a compiler fails (the other libraries are
            compiled all the same) or the disk is full.
    """
    nvcc = require_nvcc()
    cutlass = require_cutlass() if any(item.sources.uses_cutlass for item in plans) else None
    cache = cache_folder()
    build = _Build(cache, nvcc, cutlass, report)
    try:
        if build.missing(plans):
            with exclusive_build(cache) as folder:
                build.run(folder, build.missing(plans), jobs)
    except BrokenPipeError:
        raise  # of `report`
    except OSError as error:
        raise KernelBuildError(f"cannot write to {cache}: {error}") from error
    return [build.entry(item) for item in plans]


@dataclass(frozen=True)
class _Build:
    cache: Path
    nvcc: Nvcc
    cutlass: Cutlass | None
    report: Callable[[Entry], None]

    def folder(self, item: Plan) -> Path:
        return item.folder(self.cache, self.nvcc, self._cutlass(item))

    def missing(self, plans: Sequence[Plan]) -> list[Plan]:
        return [item for item in plans if Entry.read(self.folder(item)) is None]

    def entry(self, item: Plan) -> Entry:
        entry = Entry.read(self.folder(item))
        if entry is None:
            raise KernelBuildError(f"{item.variant.name}: removed from {self.cache} meanwhile")
        return entry

    def run(self, folder: Path, plans: Sequence[Plan], jobs: int | None) -> None:
        named = {item.key: item for item in plans}
        failed = dict(named)

        def ended(key: str) -> None:
            # A source edited meanwhile went into the library, but not into its key.
            unchanged = plan(named[key].variant, named[key].mode, named[key].target).key == key
            if unchanged and (folder / key / LIBRARY).exists():
                self._publish(named[key], folder / key)
                del failed[key]

        said = ninja.run(folder, [self._job(item) for item in named.values()], ended, jobs)
        if failed:
            logs = [_failure(item, folder / key) for key, item in failed.items()]
            # What ninja itself says matters only where no compiler got to say anything.
            raise KernelBuildError("\n".join(logs) if any(logs) else said.strip())

    def _job(self, item: Plan) -> ninja.Job:
        command = item.command(self.nvcc, self._cutlass(item))
        return ninja.Job(item.key, command, LIBRARY)

    def _cutlass(self, item: Plan) -> Cutlass | None:
        return self.cutlass if item.sources.uses_cutlass else None

    def _publish(self, item: Plan, built: Path) -> None:
        log = (built / ninja.LOG).read_text(encoding="utf-8", errors="replace")
        library, start = ((built / name).stat() for name in (LIBRARY, ninja.START))
        entry = Entry(
            folder=self.folder(item),
            variant=item.variant.name,
            target=str(item.target),
            mode=str(item.mode),
            nvcc=self.nvcc.version,
            seconds=round(library.st_mtime - start.st_mtime, 1),
            sha256=file_sha256(built / LIBRARY),
            usage=Usage(0, 0, 0, 0) if item.target.ptx else parse_ptxas(log),
        )
        publish(entry, built / LIBRARY)
        self.report(entry)


def _failure(item: Plan, folder: Path) -> str:
    if (folder / LIBRARY).exists():
        return f"{item.variant.name}: a source was edited while it was compiled; build it again"
    log = folder / ninja.LOG
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    shown = [line for line in lines if not line.startswith("ptxas info")][-_LOG_LINES:]
    return "\n".join([f"{item.variant.name} ({item.mode}):", *shown]) if shown else ""
