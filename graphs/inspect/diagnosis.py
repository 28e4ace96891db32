"""Why a capture failed: the user's line, the operator, the driver's reason, and what to do."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterable
from types import FrameType, TracebackType

import torch

from ..failures import Diagnosis, Failure, Line

# Frames in these folders are never the user's.
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, os.path.dirname(__file__))
)


def diagnose(error: BaseException, failure: Failure | None) -> Diagnosis:
    """Return what is known about a failure of a step.

    Args:
        error: what was raised.
        failure: what else is known where it was raised in a capture; None where it was not.
    """
    if failure is None:
        line = line_of_traceback(error.__traceback__)
        return Diagnosis(line, remedy=find_remedy([_text(error)], _REMEDIES[:1]))
    trace = failure.trace
    line, operator, place = line_of_traceback(error.__traceback__), None, None
    if trace is not None and trace.failed is not None:
        operator = trace.failed.operator
        line = trace.failed.line or line
    elif trace is not None and trace.between is not None:
        before, after = trace.between
        line = None  # of what came after the failure, and had to bear it
        begin, end = before or "the step's beginning", after or "the step's end"
        place = f"after {begin}, before {end}"
    texts = [_text(error), operator or "", line.text if line else "", *failure.reasons]
    outside = () if trace is None else tuple(trace.outside)
    return Diagnosis(line, operator, place, outside, tuple(failure.reasons), find_remedy(texts))


def line_of_traceback(trace: TracebackType | None) -> Line | None:
    """Return the innermost line of a traceback that is the user's; None if there is none."""
    own = [at for at in traceback.walk_tb(trace) if _is_users(at[0])]
    return _line(*own[-1]) if own else None


def line_of_stack(frame: FrameType | None) -> Line | None:
    """Return the innermost line below `frame` that is the user's; None if there is none."""
    own = (at for at in traceback.walk_stack(frame) if _is_users(at[0]))
    innermost = next(own, None)
    return None if innermost is None else _line(*innermost)


def find_remedy(
    texts: Iterable[str], remedies: Iterable[tuple[str, str]] | None = None
) -> str | None:
    """Return what to do about a failure that these texts describe; None for an unknown one."""
    described = "\n".join(texts)
    for pattern, remedy in _REMEDIES if remedies is None else remedies:
        if re.search(pattern, described, re.IGNORECASE):
            return remedy
    return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(("<", *_LIBRARIES))


def _line(frame: FrameType, number: int) -> Line:
    file = frame.f_code.co_filename
    text = linecache.getline(file, number, frame.f_globals).strip()
    return Line(file, number, frame.f_code.co_name, text)


# The first that matches is shown, so the particular ones come first.
_REMEDIES = (
    (
        r"out of memory|OutOfMemoryError",
        "the device is out of memory: capture fewer or smaller batch sizes, or give the cache less "
        "memory, since graphs need their pool beside it",
    ),
    (
        r"is not compiled and the stream is being captured|MissingKernelError|_dynamo|inductor|"
        r"cuModuleLoad|cuLibraryLoad|nvrtc",
        "something was to be compiled or loaded inside the capture: compile it before, or have the "
        "step do in its warm-up calls, on the same batch size, all that it does in the capture",
    ),
    (
        r"grouped_mm|\bexpert_(hit|mask)\b",  # the operators, and transformers' own lines
        "the experts implementation of transformers reads on the host where tokens go, as its "
        'default "grouped_mm" may and its "eager" does: call '
        'model.set_experts_implementation("batched_mm") before the capture, or load the model with '
        'experts_implementation="batched_mm"',
    ),
    (
        r"unless the CPU tensor is pinned|cuMemcpy\w*Async.*pageable|torch\.(tensor|as_tensor)\(|"
        r"from_numpy",
        "a copy between the host and the device: make what the step needs of the host a buffer of "
        "StaticBuffers, or a tensor of the device made once before the capture",
    ),
    (
        r"_local_scalar_dense|aten\.(nonzero|is_nonzero|equal|masked_select|unique)|"
        r"\.(item|tolist|cpu|numpy)\(\)",
        "the step reads values of the device on the host, which a graph cannot do: decide on the "
        "device (torch.where, a mask, an index tensor), or make the value an input",
    ),
    (
        r"legacy stream|CAPTURE_IMPLICIT",
        "something uses the default stream: give it torch.cuda.current_stream(), on which the step "
        "is captured",
    ),
    (
        r"from another thread|CAPTURE_WRONG_THREAD|initiated from another thread",
        "another thread worked on the stream that is captured, or the step waited for one that "
        "did: let the step do its work in the thread that calls it",
    ),
    (
        r"unjoined|CAPTURE_UNJOINED",
        "the step began work on another stream and did not wait for it: call "
        "torch.cuda.current_stream().wait_stream(other) at its end",
    ),
    (
        r"CAPTURE_ISOLATION|uncaptured work|CAPTURE_MERGE",
        "the step waits for work that is not captured: wait for events of that kind before the "
        "capture, or record them on the captured stream",
    ),
    (
        r"cuMem(Alloc|Free|HostAlloc|Create|Map|Unmap|HostRegister)|cudaMalloc|cudaFree|"
        r"cudaHostAlloc",
        "a library allocates or frees memory by itself: have it do so in the warm-up calls, or "
        "give it memory made by torch before the capture",
    ),
    (
        r"synchronize|cu(da)?(Stream|Event|Device|Ctx)(Query|Synchronize)",
        "the step waits for the device, which is impossible while nothing runs: leave that to the "
        "caller of run()",
    ),
    (
        r"CUDA ?Generator|Offset increment",
        "random numbers from a generator that the capture does not know: draw them from the "
        "default generator of the device, or better from a counter among the inputs",
    ),
)
