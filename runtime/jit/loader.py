"""From a variant to a loaded library, compiling it on first use where that is allowed."""

from __future__ import annotations

import sys
import threading
from functools import cache

from .. import _C
from . import compiler
from .cache import Entry, pinned_library
from .errors import MissingKernelError
from .location import cache_folder
from .mode import BuildMode
from .targets import DEFAULT, target_for
from .toolchain import INSTALL_CUTLASS, find_cutlass, find_nvcc
from .variant import Variant

_loaded: dict[tuple[Variant, int], _C.Library] = {}
_compiling = threading.Lock()


def load(variant: Variant, *, device: int, stream: int) -> _C.Library:
    """Return the library of a variant, ready to launch on a device.

    The first call for a variant finds its library in the cache or compiles it, with one line on
    stderr, and loads it; later calls cost a dictionary look-up.

    Args:
        variant: which kernel.
        device: index of the device, which must be the current one.
        stream: integer handle of the stream that the caller will launch on. While it is being
            captured nothing is compiled: that would stall the capture unseen.

    Raises:
        MissingKernelError: when the variant is not compiled and `stream` is capturing, OSTINATO_JIT
            is 0, or nvcc or CUTLASS is not installed. It names the variant and the command.
        KernelCacheError: when the cache has no place, or others than the user and root can change
            it or the library.
        KernelBuildError: when compiling fails.
        RuntimeError: when the library is of another version than `ostinato._C`, or the device
            refuses it.
        ValueError: when OSTINATO_CAPABILITY is not one the device can stand in for.
    """
    found = _loaded.get((variant, device))
    if found is not None:
        return found
    entry = _entry(variant, device, stream)
    library = _C.Library(entry.library, pinned_library(entry))
    library.prepare()
    # Another thread may have been as fast: both have loaded the same file.
    return _loaded.setdefault((variant, device), library)


def build_command(plan: compiler.Plan) -> str:
    """Return the command line that compiles a plan's variant."""
    arch = "" if plan.target == DEFAULT else f" --arch {plan.target}"
    return f"python -m ostinato build --only {plan.variant.name}{arch}{plan.mode.flags}"


def _entry(variant: Variant, device: int, stream: int) -> Entry:
    target = target_for(device)
    if target is None:
        raise RuntimeError(f"device {device}: got a GPU for which no kernel is compiled")
    plan = compiler.plan(variant, _mode(), target)
    entry = compiler.find(plan)
    if entry is not None:
        return entry
    obstacle = _obstacle(plan, stream)
    damaged = ", ".join(map(str, compiler.damaged(plan)))
    if obstacle is not None:
        state = f"is damaged in {damaged}" if damaged else "is not compiled"
        raise MissingKernelError(
            f"kernel {variant.name} ({plan.mode}) {state} and {obstacle}: "
            f"run `{build_command(plan)}` before"
        )
    # Only threads that want to compile wait here: a capture in another one goes on.
    with _compiling:
        if compiler.find(plan) is None:
            why = f", since it is damaged in {damaged}" if damaged else ""
            print(
                f"ostinato: compiling kernel {variant.name} once, into {cache_folder()}{why}",
                file=sys.stderr,
                flush=True,
            )
        return compiler.build([plan])[0]


def _obstacle(plan: compiler.Plan, stream: int) -> str | None:
    """Return why a variant must or can not be compiled now, None when it may be."""
    if _C.is_capturing(stream):
        return "the stream is being captured"
    if not compiler.jit_enabled():
        return "OSTINATO_JIT=0 forbids to compile it now"
    if find_nvcc() is None:
        return "there is no nvcc to compile it now (`pip install 'ostinato[cuda]'` brings one)"
    if plan.sources.uses_cutlass and find_cutlass() is None:
        return f"there are no CUTLASS headers ({INSTALL_CUTLASS})"
    return None


@cache
def _mode() -> BuildMode:
    """Return the mode of this process: asked for once, since a captured graph keeps its kernels.

    Raises:
        ValueError: when OSTINATO_DELAY_SITE names no site of any kernel.
    """
    mode = BuildMode.from_environment()
    mode.check("OSTINATO_DELAY_SITE")
    return mode
