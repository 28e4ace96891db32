"""What a step does with its inputs: in a burst the next step gets them as this one left them."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..buffers import BatchView
from ..errors import BurstError
from ..outputs import Outputs, Step, StepOutput
from .rules import BurstRules, Feed, name_of


class WatchedStep:
    """Calls a step, outside of captures, and sees what it does with its input buffers.

    A call does not wait for the device, which may be waiting for another rank.

    Args:
        step: what is called.
        rules: how it is to feed itself.
        names: of its buffers.
    """

    def __init__(self, step: Step, rules: BurstRules, names: Collection[str]) -> None:
        self._step = step
        self._rules = rules
        self._names = tuple(names)
        self._written: dict[str, torch.Tensor] = {}  # on the device: whether any call did so
        self._views: set[str] = set()  # outputs that were views of buffers

    def __call__(self, batch: BatchView) -> StepOutput:
        """Call the step."""
        before = {name: batch[name].clone() for name in self._names}
        returned = self._step(batch)
        for name, rows in before.items():
            # Bits, since a NaN differs from itself.
            written = (rows.view(torch.uint8) != batch[name].view(torch.uint8)).any()
            self._written[name] = written | self._written.get(name, written)
        inputs = {_memory(batch[name]) for name in self._names}
        outputs = Outputs.of(returned, batch)
        for name, tensor in zip(outputs.names, outputs.tensors, strict=True):
            if _memory(tensor) in inputs:
                self._views.add(name)
        return returned

    def check(self) -> None:
        """Refuse the step for what the calls have shown; to be called when they have ended.

        Raises:
            BurstError: when one has written to a buffer, or would feed one from a view of a buffer.
        """
        for name, written in self._written.items():
            if written:
                raise BurstError(
                    f"the step writes to its input buffer {name!r}, which nothing stages anew "
                    f"between the steps of a burst: let it write to batch[{name!r}].clone()"
                )
        for name, rule in self._rules.next.items():
            if isinstance(rule, Feed) and name_of(rule.output) in self._views:
                # A thread of the device may write the buffer before another has read it.
                raise BurstError(
                    f"next[{name!r}]: the step returns a view of an input buffer as "
                    f"{name_of(rule.output)}, which changes while it is fed: let it return a clone"
                )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
