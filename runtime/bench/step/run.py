"""The decode step: latency of one replay of the engine's captured step, at a given KV length."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ostinato.graphs import BufferSpec, GraphRunner, StaticBuffers

from ...engine.decode_step import DecodeStep, SeenTokens
from ...models import (
    Decoder,
    KVFormat,
    ModelConfig,
    PagedKVCache,
    ScaleKind,
    compile_kernels,
    kv_format,
)
from ...models.l2.partitioned_memory import free_unused
from ..plans import check_least
from ..report import FloorRow, Row
from ..shapes import KV_SCALES, KV_SUFFIXES
from ..timing import MIN_REPEATS, time_calls
from ..weights import dtype_name, precision
from .breakdown import Span, shares_of, sites_of, trace
from .roofline import RooflineTime, kernel_rooflines, roofline_of, step_roofline
from .work import kv_bytes, step_flops, weight_bytes


@dataclass(frozen=True)
class StepPlan:
    """The measurements to make: every batch at every context.

    Args:
        batches: sequences decoded at once.
        contexts: tokens of each sequence in the KV cache, this step's included.
        page_size: tokens per KV page.
        repeats: replays, whose median is the result.
        temperature: of sampling; 0 is greedy.
        breakdown: trace a step and say what each kernel adds to it; on CUDA only.
        kv_cache_dtype: as of `Engine`.
        kv_scales: likewise.
        padded: sequences of a graph in which every batch is timed, too, beside padding; 0 for none.
    """

    batches: Sequence[int]
    contexts: Sequence[int]
    page_size: int = 16
    repeats: int = 30
    temperature: float = 0.0
    breakdown: bool = False
    kv_cache_dtype: str = "auto"
    kv_scales: ScaleKind | None = None
    padded: int = 0

    def cache_format(self, model: Decoder) -> KVFormat:
        """Return how the cache stores numbers; ValueError for what `kv_format` refuses."""
        return kv_format(model.config, model.kv_scales, self.kv_cache_dtype, self.kv_scales)

    def check(self, config: ModelConfig) -> None:
        """Refuse what cannot be measured on a model.

        Raises:
            ValueError: for a number that is too small, or a context that the model does not have.
        """
        least = [("batch", batch, 1) for batch in self.batches]
        least += [("context", context, 1) for context in self.contexts]
        least += [("page_size", self.page_size, 1), ("repeats", self.repeats, MIN_REPEATS)]
        check_least(least)
        if self.padded and self.padded <= max(self.batches):
            raise ValueError(
                f"padded: got {self.padded}, expected more than {max(self.batches)}, the batch"
            )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: got {self.temperature}, expected at least 0")
        if max(self.contexts) > config.max_position_embeddings:
            raise ValueError(
                f"context: got {max(self.contexts)}, expected at most the model's "
                f"{config.max_position_embeddings}"
            )


@dataclass(frozen=True, kw_only=True)
class StepRow(FloorRow):
    """A step's row; `floor_us` is the sum of its kernels' rooflines."""


@dataclass(frozen=True)
class KernelRow:
    """The time that the kernels of one site take of a step.

    Args:
        case, impl: of the step.
        kernel: the site (`breakdown.sites_of`).
        launches: of a step.
        us: added by all of them to the step, as the profiler saw it, which slows it down a little.
        share: of all that the step's kernels add.
        running_us: from the beginnings to the ends of the launches, which overlap.
        floor_us: roofline of all launches; None for kernels that read neither weights nor the
            cache, for those that add nothing, and where the GPU's roofline is not known.
        tb_s: bytes of the roofline by `us`; None where `floor_us` is.
    """

    case: str
    impl: str
    kernel: str
    launches: int
    us: float
    share: float
    running_us: float
    floor_us: float | None
    tb_s: float | None
    section: str = "step_kernels"


@dataclass(frozen=True)
class StepResult:
    """A measured step: one token for each of `batch` sequences.

    Args:
        batch: sequences.
        row: the time.
        kernels: what takes it, the longest first, where the plan asks for it.
        run: the kernels of one step, in the order of their starts, likewise.
        sites: what each of `run` does.
    """

    batch: int
    row: StepRow
    kernels: Sequence[KernelRow] = ()
    run: Sequence[Span] = ()
    sites: Sequence[str] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all sequences."""
        return self.batch / self.row.us * 1e6


def time_steps(model: Decoder, name: str, plan: StepPlan) -> Iterator[StepResult]:
    """Time the decode step, yielding results as they are measured.

    A step is what the engine's runner does for one token of every sequence: inputs copied from the
    host into the static buffers, then the replay, sampling included. The sequences' pages are
    scattered over a cache of just the size needed.

    Args:
        model: the decoder.
        name: of the model, as the rows shall call it.
        plan: what to measure.

    Kernels that are not compiled yet are compiled at the call.

    Raises:
        ValueError: at the call, for what `StepPlan.check` and `kv_format` refuse.
        MemoryError: when there is no room for the sequences of a context.
    """
    plan.check(model.config)
    compile_kernels(model, plan.cache_format(model))
    return _time_contexts(model, name, plan)


def _time_contexts(model: Decoder, name: str, plan: StepPlan) -> Iterator[StepResult]:
    for context in sorted(set(plan.contexts)):
        yield from _time_context(model, name, plan, context)
        # A step and its runner refer to each other, and hold the cache.
        gc.collect()
        free_unused()


def _time_context(model: Decoder, name: str, plan: StepPlan, context: int) -> Iterator[StepResult]:
    batches = sorted(set(plan.batches))
    pages_each, cache_format = -(-context // plan.page_size), plan.cache_format(model)
    most = max(batches[-1], plan.padded)
    try:
        cache = PagedKVCache.for_model(
            model.config,
            num_pages=1 + batches[-1] * pages_each,
            page_size=plan.page_size,
            device=model.device,
            kv_format=cache_format,
        )
        seen = SeenTokens(most, model.config.vocab_size, model.device)
        step = DecodeStep(model, cache, seen, max_pages=pages_each)
        buffers = StaticBuffers(step.buffer_specs(), most, model.device)
    # torch raises RuntimeError; a number beyond 64 bits is an OverflowError.
    except (MemoryError, OverflowError, RuntimeError) as error:
        reason = str(error) or "out of memory"
        raise MemoryError(f"batch {batches[-1]}, context {context}: {reason}") from error
    cache.randomize()
    for padded in (0, plan.padded) if plan.padded else (0,):
        with GraphRunner(step, buffers, memory=step.memory()) as runner:
            specs = step.buffer_specs()
            yield from _time_batches(runner, specs, model, cache, name, plan, context, padded)


def _time_batches(
    runner: GraphRunner,
    specs: Mapping[str, BufferSpec],
    model: Decoder,
    cache: PagedKVCache,
    name: str,
    plan: StepPlan,
    context: int,
    padded: int,
) -> Iterator[StepResult]:
    """Time each batch in a graph of its own size, or all of them in that of `padded` sequences."""
    batches, cache_format = sorted(set(plan.batches)), plan.cache_format(model)
    roofline = roofline_of(model.device)
    runner.capture([padded] if padded else batches, progress=True, verify=False)
    for batch in batches:
        inputs = {
            name: tensor.to(specs[name].dtype)
            for name, tensor in step_inputs(cache, model, batch, context, plan).items()
        }
        replay = partial(runner.run, batch, inputs)
        times = time_calls(replay, model.device, repeats=plan.repeats)
        case, impl = f"{name} b{batch} ctx{context}", implementation(model, cache_format)
        case += f" in{padded}" if padded else ""
        rooflines = (
            kernel_rooflines(model, batch, context, roofline, cache_format) if roofline else {}
        )
        measured = Row.of(
            "step",
            case,
            impl,
            seconds=statistics.median(times),
            num_bytes=weight_bytes(model, batch)
            + kv_bytes(model.config, batch, context, cache_format),
            flops=step_flops(model, batch, context),
        )
        floor_us = round(step_roofline(rooflines) * 1e6, 1) if rooflines else None
        row = StepRow(**vars(measured), floor_us=floor_us)
        if not plan.breakdown:
            yield StepResult(batch, row)
            continue
        runs = trace(replay)
        sites = sites_of(
            [span.name for span in runs[0]],
            model.config.num_layers,
            [use.name for use in model.linears()],
            [use.name for use in model.experts()],
        )
        yield StepResult(batch, row, kernel_rows(row, runs, sites, rooflines), runs[-1], sites)


def kernel_rows(
    row: StepRow,
    runs: Sequence[Sequence[Span]],
    sites: Sequence[str],
    rooflines: Mapping[str, tuple[int, RooflineTime]],
) -> list[KernelRow]:
    """Return what the kernels of each site take of a step, the longest first.

    Args:
        row: of the step.
        runs: traces of it.
        sites: what each kernel does.
        rooflines: by site, launches of a step and the roofline of each.
    """
    shares = shares_of(runs, sites)
    total = sum(share.added_us for share in shares)
    rows = []
    for share in shares:
        count, roofline = rooflines.get(share.name, (0, RooflineTime(0.0, 0.0)))
        known = count == share.launches and share.added_us > 0
        rows.append(
            KernelRow(
                row.case,
                row.impl,
                share.name,
                share.launches,
                us=round(share.added_us, 2),
                share=round(share.added_us / total, 4),
                running_us=round(share.running_us, 2),
                floor_us=round(count * roofline.seconds * 1e6, 2) if known else None,
                tb_s=float(f"{count * roofline.num_bytes / share.added_us / 1e6:.4g}")
                if known
                else None,
            )
        )
    return rows


def grown_pages(cache: PagedKVCache, batch: int, tokens: int) -> torch.Tensor:
    """Return free pages [batch, pages], as sequences have them that have grown side by side."""
    sequences = range(batch)
    for sequence in sequences:
        cache.add(sequence)
    for first in range(0, tokens, cache.page_size):
        for sequence in sequences:
            cache.reserve(sequence, min(first + cache.page_size, tokens))
    pages = cache.page_table(sequences, cache.pages_for(tokens))
    for sequence in sequences:
        cache.free(sequence)
    return pages


def implementation(model: Decoder, cache_format: KVFormat | None = None) -> str:
    """Name what was timed: the layers' precision, an 8-bit KV cache, then what else is chosen."""
    name = f"ostinato_{precision(model)}"
    if cache_format is not None and cache_format.scales is not None:
        name += KV_SUFFIXES[dtype_name(cache_format.dtype)] + KV_SCALES[cache_format.scales]
    *_, head = model.linears()
    if head.linear.weight_dtype.itemsize == 1:
        name += f"_lm_head_{dtype_name(head.linear.weight_dtype)}"
    return name if model.batch_invariant else f"{name}_batch_variant"


def step_inputs(
    cache: PagedKVCache, model: Decoder, batch: int, context: int, plan: StepPlan
) -> dict[str, torch.Tensor]:
    """Return the step's inputs: random tokens at the end of sequences in the cache's free pages."""
    generator = torch.Generator().manual_seed(0)
    page_size = plan.page_size
    pages = grown_pages(cache, batch, context)
    last = context - 1
    return {
        "tokens": torch.randint(model.config.vocab_size, (batch,), generator=generator),
        "positions": torch.full((batch,), last),
        "seq_lens": torch.full((batch,), context),
        "slot_mapping": pages[:, -1].long() * page_size + last % page_size,
        "page_table": pages,
        "slots": torch.arange(batch),
        "temperature": torch.full((batch,), plan.temperature),
        "top_k": torch.zeros(batch),
        "top_p": torch.ones(batch),
        "min_p": torch.zeros(batch),
        "repetition_penalty": torch.ones(batch),
        "seeds": torch.arange(batch),
        "counters": torch.full((batch,), last),
    }
