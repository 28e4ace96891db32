"""From a variant to a loaded library, compiling it on first use where that is allowed."""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import overload

from .. import _C
from . import compiler
from .cache import (
    Entry,
    cache_folder,
)
from .errors import MissingKernelError
from .mode import BuildMode
from .targets import DEFAULT, target_for
from .toolchain import (
    find_cutlass,
    find_nvcc,
)
from .variants import (
    AppendKV,
    AttentionDecode,
    AttentionPrefill,
    Embed,
    FusedLinear,
    GemmSmallM,
    GemmTiled,
    L2Probe,
    MergeStates,
    Quantize,
    Sample,
    Variant,
)

Library = (
    _C.AppendKV
    | _C.Embed
    | _C.FusedLinear
    | _C.L2Probe
    | _C.MergeStates
    | _C.PagedDecode
    | _C.Prefill
    | _C.Quantize
    | _C.Sample
    | _C.W8A8Gemm
)

_loaded: dict[tuple[Variant, int], Library] = {}
_compiling = threading.Lock()


@overload
def load(variant: Quantize, *, device: int, stream: int) -> _C.Quantize: ...
@overload
def load(variant: AppendKV, *, device: int, stream: int) -> _C.AppendKV: ...
@overload
def load(variant: Embed, *, device: int, stream: int) -> _C.Embed: ...
@overload
def load(variant: GemmSmallM | GemmTiled, *, device: int, stream: int) -> _C.W8A8Gemm: ...
@overload
def load(variant: FusedLinear, *, device: int, stream: int) -> _C.FusedLinear: ...
@overload
def load(variant: L2Probe, *, device: int, stream: int) -> _C.L2Probe: ...
@overload
def load(variant: MergeStates, *, device: int, stream: int) -> _C.MergeStates: ...
@overload
def load(variant: Sample, *, device: int, stream: int) -> _C.Sample: ...
@overload
def load(variant: AttentionDecode, *, device: int, stream: int) -> _C.PagedDecode: ...
@overload
def load(variant: AttentionPrefill, *, device: int, stream: int) -> _C.Prefill: ...
def load(variant: Variant, *, device: int, stream: int) -> Library:
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
        KernelBuildError: when compiling fails.
        RuntimeError: when the library does not fit `ostinato._C`, or the device refuses it.
        ValueError: when OSTINATO_CAPABILITY is not one the device can stand in for.
    """
    found = _loaded.get((variant, device))
    if found is not None:
        return found
    library = _open(variant, _entry(variant, device, stream))
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
    if obstacle is not None:
        raise MissingKernelError(
            f"kernel {variant.name} ({plan.mode}) is not compiled and {obstacle}: "
            f"run `{build_command(plan)}` before"
        )
    # Only threads that want to compile wait here: a capture in another one goes on.
    with _compiling:
        if compiler.find(plan) is None:
            print(
                f"ostinato: compiling kernel {variant.name} once, into {cache_folder()}",
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
        return "CUTLASS is not installed (`pip install 'ostinato[cuda]'` brings it)"
    return None


def _open(variant: Variant, entry: Entry) -> Library:
    path = str(entry.library)
    if isinstance(variant, Quantize):
        return _C.Quantize(path)
    if isinstance(variant, AppendKV):
        return _C.AppendKV(path)
    if isinstance(variant, Embed):
        return _C.Embed(path)
    if isinstance(variant, FusedLinear):
        return _C.FusedLinear(path)
    if isinstance(variant, L2Probe):
        return _C.L2Probe(path)
    if isinstance(variant, MergeStates):
        return _C.MergeStates(path)
    if isinstance(variant, Sample):
        return _C.Sample(path)
    if isinstance(variant, AttentionPrefill):
        return _C.Prefill(path)
    return _C.PagedDecode(path) if isinstance(variant, AttentionDecode) else _C.W8A8Gemm(path)


@cache
def _mode() -> BuildMode:
    """Return the mode of this process: asked for once, since a captured graph keeps its kernels.

    Raises:
        ValueError: when OSTINATO_DELAY_SITE names no site of any kernel.
    """
    mode = BuildMode.from_environment()
    mode.check("OSTINATO_DELAY_SITE")
    return mode
