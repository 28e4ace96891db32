"""Capturing what an engine replays: decode steps, both variants of them, and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from ostinato.graphs import CaptureReport, GraphRunner
from ostinato.graphs.capture_plan import BatchSizes, CapturePlan
from ostinato.graphs.graph_key import DEFAULT

from ..models import PagedKVCache
from ..ops.common.workspace import drop_unused_workspaces
from ..ops.implementations import implementations_on
from .capture_examples import CaptureExamples
from .logits_processing import PROCESSED, LogitsProcessing
from .prefill_step import Prefill


class Captures:
    """Captures the graphs of an engine, releases them, and captures them again.

    Args:
        runner: of the decode step.
        prefill: of prompts.
        examples: for verification.
        processing: of an engine that processes logits.
        cache: of keys and values.
        max_batch: requests at once.
    """

    def __init__(
        self,
        runner: GraphRunner[dict[str, torch.Tensor]],
        prefill: Prefill,
        examples: CaptureExamples,
        processing: LogitsProcessing | None,
        cache: PagedKVCache,
        max_batch: int,
    ) -> None:
        self._runner = runner
        self._prefill = prefill
        self._examples = examples
        self._processing = processing
        self._cache = cache
        self._max_batch = max_batch

    def check(self, batch_sizes: Sequence[int] | None) -> None:
        """Raise what `capture` would raise for these sizes."""
        CapturePlan.of(self._variants(batch_sizes), None, self._max_batch)

    def capture(
        self,
        batch_sizes: Sequence[int] | None,
        *,
        progress: bool,
        verify: bool,
        wakes: bool = False,
    ) -> CaptureReport:
        """Capture each batch size and prompts; where this `wakes`, those of before `sleep`."""
        # Only verification draws examples; lending takes pages that were kept for prefixes.
        with ExitStack() as examples:
            if verify:
                examples.enter_context(self._examples.lent())
                if self._processing is not None:
                    examples.enter_context(self._processing.examples())
            if wakes:
                steps = self._runner.wake(progress=progress, verify=verify)
            else:
                sizes = self._variants(batch_sizes)
                steps = self._runner.capture(sizes, progress=progress, verify=verify)
            prompts = self._prefill.capture(progress=progress, verify=verify, wakes=wakes)
        report = steps if prompts is None else prompts + steps
        device = self._cache.storage.device
        notes = {**implementations_on(device), "KV cache": str(self._cache.format)}
        return replace(report, notes=notes)

    def sleep(self) -> None:
        """Release the graphs, and what their kernels have worked on."""
        self._runner.sleep()
        self._prefill.sleep()
        drop_unused_workspaces()

    def close(self, *, in_fork: bool) -> None:
        """Release them for good; in a fork of the process they are the parent's."""
        self._runner.close()
        self._prefill.close()
        if not in_fork:
            drop_unused_workspaces()

    def _variants(self, batch_sizes: Sequence[int] | None) -> BatchSizes:
        if self._processing is None:
            return batch_sizes
        return {DEFAULT: batch_sizes, PROCESSED: batch_sizes}
