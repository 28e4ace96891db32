"""A burst without CUDA: the steps are taken when their tokens are asked for, one after the other.

`_advance` does what advance.cu does, and is easier to read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..buffer_spec import BufferSpec
from ..buffers import BatchView
from ..graph import Graph
from .memory import CANCELLED, CONTROL_HEAD, FULL, LIMIT, ROWS, STEP, STOP, BurstMemory
from .rules import Add, BurstRules, Feed, Slot, output_of


class CpuLoop:
    """Repeats a captured step; see `BurstLoop`."""

    def __init__(
        self,
        graph: Graph,
        batch: BatchView,
        specs: Mapping[str, BufferSpec],
        rules: BurstRules,
        memory: BurstMemory,
    ) -> None:
        self._graph = graph
        self._batch = batch
        self._specs = specs
        self._rules = rules
        self._memory = memory
        self._recorded = output_of(graph.outputs, rules.record, "record")

    def launch(self) -> None:
        """Do nothing yet."""

    def wait(self, step: int) -> None:
        """Take steps until the tokens of `step` are there, or the burst has ended."""
        with torch.inference_mode(False), torch.no_grad():
            while self._memory.published <= step and not self._memory.done:
                if self._memory.cancelled:
                    self._cancel()
                    return
                self._graph.replay()
                self._advance()

    def abandon(self) -> None:
        """Do nothing: nothing has begun."""

    def release(self) -> None:
        """Give nothing back."""

    def _cancel(self) -> None:
        """End all rows where they are: no step is under way."""
        memory = self._memory
        for row in range(int(memory.control[ROWS])):
            if memory.control[CONTROL_HEAD + row * memory.row_words] != 0:
                memory.end_row(row, memory.published, CANCELLED)
        memory.end()

    def _advance(self) -> None:
        memory = self._memory
        step, n = (int(memory.control[at]) for at in (STEP, ROWS))
        tokens = self._recorded[:n].tolist()
        running = 0
        for row, token in enumerate(tokens):
            start = CONTROL_HEAD + row * memory.row_words
            state = memory.control[start : start + memory.row_words]
            limit, stops, *stop_tokens = state.tolist()
            if limit == 0:
                continue
            reason = 0
            if token in stop_tokens[:stops]:
                reason = STOP
            elif step + 1 >= limit:
                reason = LIMIT
            elif not self._move_on(row):
                reason = FULL
            if reason:
                for name, spec in self._specs.items():
                    self._batch[name][row] = spec.pad
                state[0] = 0
                memory.end_row(row, step + 1, reason)
            running += not reason
        memory.control[STEP] = step + 1
        memory.publish(step, tokens, done=not running)

    def _move_on(self, row: int) -> bool:
        """Apply the rules to a row; return whether all slots were found."""
        rules = self._rules.next
        for name, rule in rules.items():
            if isinstance(rule, Add):
                self._batch[name][row] += rule.amount
            elif isinstance(rule, Feed):
                self._batch[name][row] = output_of(self._graph.outputs, rule.output, name)[row]
        for name, rule in rules.items():
            if isinstance(rule, Slot):
                position = int(self._batch[rule.positions][row])
                column, offset = divmod(position, rule.page_size)
                table = self._batch[rule.table][row]
                if not 0 <= column < len(table):
                    return False
                page = int(table[column])
                if page == self._specs[rule.table].pad:
                    return False
                self._batch[name][row] = page * rule.page_size + offset
        return True
