"""The capture protocol: warm up every size, then capture largest first, then audit and verify.

`docs/graphs/capture.md` says which failure each step of it prevents.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from .backends.base import Backend
from .buffers import BatchView, StaticBuffers
from .errors import AuditError, CaptureError, GraphError, RankError, VerificationError
from .failures import Failure
from .graph import Graph, MemoryUse
from .graph_key import DEFAULT, Key
from .guards import MemoryWatch, only_capture
from .inspect.audit import Audit, Auditor, Finding, summarize
from .inspect.diagnosis import diagnose
from .inspect.nodes import GraphNodes
from .loop.burst import Bursts
from .outputs import Outputs, Step
from .process_group import CaptureGroup
from .report import CaptureReport, GraphReport
from .verify import find_difference

# The first call may compile, autotune or allocate; the second shows that it has settled.
_WARMUP_CALLS = 2
# Graphs that cannot be given back: the device waits for another process, for good.
_stuck: list[Graph] = []


@dataclass(frozen=True)
class CaptureOptions:
    """How graphs are captured.

    Attributes:
        progress, verify, audit: as `GraphRunner.capture` says.
        into_pool: the graphs come into the pool of the last capture, beside those in it.
    """

    progress: bool
    verify: bool
    audit: Audit
    into_pool: bool = False


def capture_graphs(
    step: Step,
    buffers: StaticBuffers,
    backend: Backend,
    keys: Sequence[Key],
    *,
    warmed: Sequence[Key],
    auditor: Auditor,
    watch: MemoryWatch,
    options: CaptureOptions,
    bursts: Bursts | None = None,
    group: CaptureGroup | None = None,
) -> tuple[dict[Key, Graph], CaptureReport]:
    """Capture `step` for each of the `keys`; all of them, or none.

    Args:
        step: what to capture.
        buffers: its inputs.
        backend: where to capture it.
        keys: what to capture.
        warmed: what to warm up before that, `keys` among it.
        auditor: of this runner's graphs.
        watch: of the declared memory, whose places are noted when the captures begin.
        options: how.
        bursts: makes each graph ready to be repeated on the device, if the step can be.
        group: the processes that do the same together; when one fails, all do.

    Raises:
        CaptureError: when the step fails; from its own exception.
        BusyError: when another runner is being captured.
        AuditError: when a strict audit refuses a graph.
        VerificationError: when a replay differs from the step.
        GraphError: when a strict audit cannot read graphs.
        ValueError, BurstError: when the step cannot be repeated on the device.
        RankError: when it fails in another process.
    """
    started = time.perf_counter()
    graphs: dict[Key, Graph] = {}
    group = group or CaptureGroup(None)
    costs = _Costs(backend, group)
    bar = partial(_bar, backend=backend, progress=options.progress)
    largest_first = _largest_first(keys)
    watched = None if bursts is None else bursts.watched(step)
    eager: Step = watched or step
    try:
        sizes = ", ".join(map(str, keys))
        group.agree(f"the capture of {sizes}, verify={options.verify}, audit={options.audit!r}")
        not_inspected = _why_not_inspected(backend, options.audit)
        # What the step makes here may outlive the caller's inference mode.
        with backend.scope(), torch.inference_mode(False), torch.no_grad(), ExitStack() as end:
            if not_inspected is None:
                auditor.begin()
            for key in bar(_largest_first(warmed), "Warming up"):
                with costs.measured("warm up", key):
                    _warm_up(eager, buffers, key)
            if watched is not None:
                watched.check()
            # A step may place its memory in the warm-up; from here on graphs have the addresses.
            watch.note()
            with only_capture():
                end.callback(backend.finish_captures)
                backend.prepare_captures(into_pool=options.into_pool)
                with _garbage_collection_paused():
                    for key in bar(largest_first, "Capturing graphs"):
                        batch = buffers.view(*key)
                        failure = partial(backend.failure, step, batch)
                        with costs.measured("capture", key, failure):
                            buffers.stage_padding(key.batch_size)
                            graphs[key] = backend.capture(step, batch)
            if not_inspected is None and keys:
                strict = options.audit == "strict"
                if strict:
                    smallest = buffers.view(*largest_first[-1])
                    outside = _work_outside(step, smallest, backend, required=True)
                    if outside is not None:
                        raise AuditError(f"the graphs are refused: {outside}")
                audited = bar(largest_first, "Auditing graphs")
                not_inspected = _audit(audited, graphs, backend, auditor, costs, strict=strict)
            if options.verify:
                for key in bar(largest_first, "Verifying graphs"):
                    with costs.measured("verify", key):
                        difference = find_difference(
                            eager, buffers, backend, graphs[key], key, group
                        )
                    if difference is not None:
                        with suppress(Exception):  # which must not hide the difference
                            if outside := _work_outside(step, buffers.view(*key), backend):
                                difference += f"; {outside}"
                        raise VerificationError(difference)
                    with costs.measured("time", key):
                        costs.replayed(key, backend.replay_us(graphs[key], group))
                if watched is not None:
                    watched.check()
            if (moved := watch.moved()) is not None:
                raise CaptureError(f"{moved} has moved since the captures began: graphs have it")
            if bursts is not None:
                for key in bar(largest_first, "Preparing bursts"):
                    bursts.prepare(graphs[key], key)
            buffers.stage_padding(buffers.max_batch)
        group.agree("the end of the capture")
    except BaseException as error:
        captured = list(graphs.values())
        graphs.clear()
        first, is_idle = group.failed(error, backend.is_idle)
        if is_idle:
            backend.release(captured)
        else:
            _stuck.extend(captured)
        if first is not None:
            raise first from error
        raise
    verdict = _verdict(buffers) if options.verify else "not verified"
    reports = tuple(costs.report(key, graphs[key], verdict) for key in keys)
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
        backend.inspector.check_readable()
    except GraphError as error:
        if audit == "strict":
            raise GraphError(f"audit='strict' cannot be done: {error}") from error
        return str(error)
    return None


def _audit(
    keys: Iterable[Key],
    graphs: Mapping[Key, Graph],
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
    for key in keys:
        with costs.measured("audit", key):
            try:
                nodes = backend.inspector.nodes(graphs[key])
            except GraphError as error:
                if strict:
                    raise
                return str(error)
            findings = () if nodes is None else auditor.find(nodes)
        if strict:
            _refuse(key, findings)
        costs.recorded(key, nodes, findings)
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


def _refuse(key: Key, findings: Sequence[Finding]) -> None:
    refused = [finding for finding in findings if finding.refused]
    if refused:
        raise AuditError(f"the graph of {key} is refused:\n{summarize(refused)}")


def _largest_first(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key.tokens, key.batch_size, key.variant), reverse=True)


def _warm_up(step: Step, buffers: StaticBuffers, key: Key) -> None:
    batch = buffers.view(*key)
    for _ in range(_WARMUP_CALLS):
        # Padding is harmless by definition: a warm-up must not write into anybody's state.
        buffers.stage_padding(key.batch_size)
        Outputs.of(step(batch), batch)


def _verdict(buffers: StaticBuffers) -> str:
    padding = [name for name, spec in buffers.specs.items() if spec.example is None]
    return f"bit-equal ({', '.join(padding)} at padding)" if padding else "bit-equal"


class _Costs:
    """Measures what each graph costs in each phase, and names the phase that failed."""

    def __init__(self, backend: Backend, group: CaptureGroup) -> None:
        self._backend = backend
        self._group = group
        self._ms: dict[tuple[str, Key], float] = {}
        self._memory: dict[Key, tuple[MemoryUse, MemoryUse]] = {}
        self._recorded: dict[Key, tuple[GraphNodes, Sequence[Finding]]] = {}
        self._replay_us: dict[Key, float | None] = {}

    @contextmanager
    def measured(
        self, phase: str, key: Key, failure: Callable[[], Failure] | None = None
    ) -> Iterator[None]:
        """Measure the block; `failure` tells more of an exception raised in a capture."""
        # Only graphs stay; what the other phases allocate is given back.
        before = self._backend.inspector.memory() if phase == "capture" else None
        started = time.perf_counter()
        try:
            yield
            # A step whose collectives wait for a rank that has failed never ends on the device.
            self._group.agree(f"{phase} {key}")
            self._backend.synchronize()
        except RankError:
            raise
        except Exception as error:
            diagnosis = diagnose(error, None if failure is None else _ask(failure))
            what = f"could not {phase} {key}: {type(error).__name__}: {error}"
            raise CaptureError(f"{what}\n{diagnosis}".rstrip(), diagnosis) from error
        self._ms[phase, key] = 1e3 * (time.perf_counter() - started)
        if before is not None and (after := self._backend.inspector.memory()) is not None:
            self._memory[key] = (before, after)

    def recorded(self, key: Key, nodes: GraphNodes | None, findings: Sequence[Finding]) -> None:
        if nodes is not None:
            self._recorded[key] = nodes, findings

    def replayed(self, key: Key, microseconds: float | None) -> None:
        self._replay_us[key] = microseconds

    def report(self, key: Key, graph: Graph, verdict: str) -> GraphReport:
        pool_mib = device_mib = None
        if key in self._memory:
            before, after = self._memory[key]
            pool_mib = (after.pool_bytes - before.pool_bytes) / 2**20
            device_mib = (before.free_bytes - after.free_bytes) / 2**20
        nodes, findings = self._recorded.get(key, (None, None))
        return GraphReport(
            batch_size=key.batch_size,
            warmup_ms=self._ms["warm up", key],
            capture_ms=self._ms["capture", key] - (graph.instantiate_ms or 0.0),
            verify_ms=self._ms.get(("verify", key)),
            pool_mib=pool_mib,
            device_mib=device_mib,
            verdict=verdict,
            instantiate_ms=graph.instantiate_ms,
            audit_ms=None if nodes is None else self._ms["audit", key],
            replay_us=self._replay_us.get(key),
            nodes=None if nodes is None else nodes.kinds(),
            kernels=None if nodes is None else nodes.kernels(),
            edges=None if nodes is None else len(nodes.edges),
            pdl_edges=None if nodes is None else nodes.programmatic_edges(),
            findings=None if findings is None else tuple(findings),
            q_len=key.variant.q_len,
            variant=key.variant.name,
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
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


def _bar(keys: Iterable[Key], label: str, *, backend: Backend, progress: bool) -> Iterator[Key]:
    # None shows the bar on a terminal only. A program without a console has no standard error, or
    # has closed it.
    if not progress or getattr(sys.stderr, "closed", True):
        # Not a bar that is disabled: even that takes tqdm's lock, which an exception from a signal
        # handler can leave with this thread, so that captures of other threads would wait forever.
        yield from keys
        return
    with tqdm(keys, disable=None, leave=False) as bar:
        for key in bar:
            memory = None if bar.disable else backend.inspector.memory()
            free = "" if memory is None else f" | avail_mem = {memory.free_bytes / 2**30:.2f} GiB"
            variant = "" if key.variant == DEFAULT else f", {key.variant}"
            bar.set_description(f"{label}: bs = {key.batch_size}{variant}{free}")
            yield key
