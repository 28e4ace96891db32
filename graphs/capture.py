"""The capture protocol: warm up every size, then capture largest first, then audit and verify.

`docs/graphs.md` says which failure each step of it prevents.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from tqdm import tqdm

from ostinato.graphs.audit import Audit, Auditor, Finding, summarize
from ostinato.graphs.backend import Backend, Graph, MemoryUse
from ostinato.graphs.buffers import BatchView, StaticBuffers
from ostinato.graphs.diagnosis import Failure, diagnose
from ostinato.graphs.errors import AuditError, CaptureError, GraphError, VerificationError
from ostinato.graphs.guards import only_capture
from ostinato.graphs.outputs import Outputs, Step
from ostinato.graphs.recording import Recording
from ostinato.graphs.report import CaptureReport, GraphReport
from ostinato.graphs.verify import find_difference

# The first call may compile, autotune or allocate; the second shows that it has settled.
_WARMUP_CALLS = 2


def capture_graphs(
    step: Step,
    buffers: StaticBuffers,
    backend: Backend,
    batch_sizes: Sequence[int],
    *,
    auditor: Auditor,
    progress: bool,
    verify: bool,
    audit: Audit,
) -> tuple[dict[int, Graph], CaptureReport]:
    """Capture `step` for each of the increasing `batch_sizes`; all of them, or none.

    Raises:
        CaptureError: when the step fails; from its own exception.
        BusyError: when another runner is being captured.
        AuditError: when a strict audit refuses a graph.
        VerificationError: when a replay differs from the step.
        GraphError: when a strict audit cannot read graphs.
    """
    started = time.perf_counter()
    graphs: dict[int, Graph] = {}
    costs = _Costs(backend)
    largest_first = sorted(batch_sizes, reverse=True)
    not_inspected = _why_not_inspected(backend, audit)
    try:
        # What the step makes here may outlive the caller's inference mode.
        with backend.scope(), torch.inference_mode(False), torch.no_grad():
            if not_inspected is None:
                auditor.begin()
            for size in _bar(largest_first, "Warming up", backend, progress):
                with costs.measured("warm up", size):
                    _warm_up(step, buffers, size)
            with only_capture():
                backend.prepare_capture()
                with _garbage_collection_paused():
                    for size in _bar(largest_first, "Capturing graphs", backend, progress):
                        batch = buffers.view(size)
                        failure = partial(backend.failure, step, batch)
                        with costs.measured("capture", size, failure):
                            buffers.stage_padding(size)
                            graphs[size] = backend.capture(step, batch)
            if not_inspected is None:
                bar = _bar(largest_first, "Auditing graphs", backend, progress)
                strict = audit == "strict"
                if strict:
                    smallest = buffers.view(batch_sizes[0])
                    outside = _work_outside(step, smallest, backend, required=True)
                    if outside is not None:
                        raise AuditError(f"the graphs are refused: {outside}")
                not_inspected = _audit(bar, graphs, backend, auditor, costs, strict=strict)
            if verify:
                for size in _bar(largest_first, "Verifying graphs", backend, progress):
                    with costs.measured("verify", size):
                        difference = find_difference(step, buffers, backend, graphs[size], size)
                    if difference is not None:
                        with suppress(Exception):  # which must not hide the difference
                            if outside := _work_outside(step, buffers.view(size), backend):
                                difference += f"; {outside}"
                        raise VerificationError(difference)
                    with costs.measured("time", size):
                        costs.replayed(size, backend.replay_us(graphs[size]))
            buffers.stage_padding(largest_first[0])
    except BaseException:
        captured = list(graphs.values())
        graphs.clear()
        backend.release(captured)
        raise
    verdict = _verdict(buffers) if verify else "not verified"
    reports = tuple(costs.report(size, graphs[size], verdict) for size in batch_sizes)
    total_ms = 1e3 * (time.perf_counter() - started)
    return graphs, CaptureReport(backend.name, total_ms, reports, not_inspected)


def _why_not_inspected(backend: Backend, audit: Audit) -> str | None:
    """Return why graphs will not be read; None where they will be.

    Raises:
        GraphError: when they cannot be, and a strict audit needs to.
    """
    if audit == "off":
        return "audit='off'"
    try:
        backend.check_readable()
    except GraphError as error:
        if audit == "strict":
            raise GraphError(f"audit='strict' cannot be done: {error}") from error
        return str(error)
    return None


def _audit(
    sizes: Iterable[int],
    graphs: Mapping[int, Graph],
    backend: Backend,
    auditor: Auditor,
    costs: _Costs,
    *,
    strict: bool,
) -> str | None:
    """Read and audit every graph; return why one could not be read, None if all were.

    Raises:
        AuditError: when strict and something is found.
        CaptureError: when strict and a graph cannot be read.
    """
    for size in sizes:
        with costs.measured("audit", size):
            try:
                recording = backend.recording(graphs[size])
            except GraphError as error:
                if strict:
                    raise
                return str(error)
            findings = () if recording is None else auditor.find(recording)
        if strict:
            _refuse(size, findings)
        costs.recorded(size, recording, findings)
    return None


def _work_outside(
    step: Step, batch: BatchView, backend: Backend, *, required: bool = False
) -> str | None:
    """Return which operators run on a stream that is not captured; None if none is seen.

    Raises:
        AuditError: when the step cannot be watched though it is required.
    """
    with only_capture(), _garbage_collection_paused():
        trace = backend.trace(step, batch)
    if trace is None:
        return None
    if required and trace.error is not None:
        raise AuditError(f"the step could not be watched: {trace.error}") from trace.error
    if not trace.outside:
        return None
    return "on a stream that is not captured ran " + ", ".join(map(str, trace.outside[:3]))


def _refuse(size: int, findings: Sequence[Finding]) -> None:
    refused = [finding for finding in findings if finding.refused]
    if refused:
        raise AuditError(f"the graph of batch size {size} is refused:\n{summarize(refused)}")


def _warm_up(step: Step, buffers: StaticBuffers, size: int) -> None:
    batch = buffers.view(size)
    for _ in range(_WARMUP_CALLS):
        # Padding is harmless by definition: a warm-up must not write into anybody's state.
        buffers.stage_padding(size)
        Outputs.of(step(batch), batch)


def _verdict(buffers: StaticBuffers) -> str:
    padding = [name for name, spec in buffers.specs.items() if spec.example is None]
    return f"bit-equal ({', '.join(padding)} at padding)" if padding else "bit-equal"


class _Costs:
    """Measures what each batch size costs in each phase, and names the phase that failed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ms: dict[tuple[str, int], float] = {}
        self._memory: dict[int, tuple[MemoryUse, MemoryUse]] = {}
        self._recorded: dict[int, tuple[Recording, Sequence[Finding]]] = {}
        self._replay_us: dict[int, float | None] = {}

    @contextmanager
    def measured(
        self, phase: str, size: int, failure: Callable[[], Failure] | None = None
    ) -> Iterator[None]:
        """Measure the block; `failure` tells more of an exception raised in a capture."""
        # Only graphs stay; what the other phases allocate is given back.
        before = self._backend.memory() if phase == "capture" else None
        started = time.perf_counter()
        try:
            yield
            self._backend.synchronize()
        except Exception as error:
            diagnosis = diagnose(error, None if failure is None else _ask(failure))
            what = f"could not {phase} batch size {size}: {type(error).__name__}: {error}"
            raise CaptureError(f"{what}\n{diagnosis}".rstrip(), diagnosis) from error
        self._ms[phase, size] = 1e3 * (time.perf_counter() - started)
        if before is not None and (after := self._backend.memory()) is not None:
            self._memory[size] = (before, after)

    def recorded(self, size: int, recording: Recording | None, findings: Sequence[Finding]) -> None:
        if recording is not None:
            self._recorded[size] = recording, findings

    def replayed(self, size: int, microseconds: float | None) -> None:
        self._replay_us[size] = microseconds

    def report(self, size: int, graph: Graph, verdict: str) -> GraphReport:
        pool_mib = device_mib = None
        if size in self._memory:
            before, after = self._memory[size]
            pool_mib = (after.pool_bytes - before.pool_bytes) / 2**20
            device_mib = (before.free_bytes - after.free_bytes) / 2**20
        recording, findings = self._recorded.get(size, (None, None))
        return GraphReport(
            batch_size=size,
            warmup_ms=self._ms["warm up", size],
            capture_ms=self._ms["capture", size] - (graph.instantiate_ms or 0.0),
            verify_ms=self._ms.get(("verify", size)),
            pool_mib=pool_mib,
            device_mib=device_mib,
            verdict=verdict,
            instantiate_ms=graph.instantiate_ms,
            audit_ms=None if recording is None else self._ms["audit", size],
            replay_us=self._replay_us.get(size),
            nodes=None if recording is None else recording.kinds(),
            kernels=None if recording is None else recording.kernels(),
            edges=None if recording is None else len(recording.edges),
            pdl_edges=None if recording is None else recording.programmatic_edges(),
            findings=None if findings is None else tuple(findings),
        )


def _ask(failure: Callable[[], Failure]) -> Failure:
    """Return what the backend knows; should asking fail too, that must not hide the first error."""
    try:
        return failure()
    except Exception as error:
        return Failure((f"a second capture, to find the place, failed: {error}",))


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _bar(sizes: Iterable[int], label: str, backend: Backend, progress: bool) -> Iterator[int]:
    # None shows the bar on a terminal only.
    with tqdm(sizes, disable=None if progress else True, leave=False) as bar:
        for size in bar:
            memory = None if bar.disable else backend.memory()
            free = "" if memory is None else f" | avail_mem = {memory.free_bytes / 2**30:.2f} GiB"
            bar.set_description(f"{label}: bs = {size}{free}")
            yield size
