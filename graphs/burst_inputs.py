"""What a step does with its inputs: in a burst the next step gets them as this one left them."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ostinato.graphs.buffers import BatchView
from ostinato.graphs.errors import BurstError
from ostinato.graphs.outputs import Step, StepOutput


class WatchedStep:
    """Calls a step, outside of captures, and sees whether it leaves its input buffers alone.

    A call does not wait for the device, which may be waiting for another rank.

    Args:
        step: what is called.
        names: of its buffers.
    """

    def __init__(self, step: Step, names: Collection[str]) -> None:
        self._step = step
        self._names = tuple(names)
        self._written: dict[str, torch.Tensor] = {}  # on the device: whether any call did so

    def __call__(self, batch: BatchView) -> StepOutput:
        """Call the step."""
        before = {name: batch[name].clone() for name in self._names}
        returned = self._step(batch)
        for name, rows in before.items():
            # Bits, since a NaN differs from itself.
            written = (rows.view(torch.uint8) != batch[name].view(torch.uint8)).any()
            self._written[name] = written | self._written.get(name, written)
        return returned

    def check(self) -> None:
        """Refuse the step for what the calls have shown; to be called when they have ended.

        Raises:
            BurstError: when one has written to a buffer.
        """
        for name, written in self._written.items():
            if written:
                raise BurstError(
                    f"the step writes to its input buffer {name!r}, which nothing stages anew "
                    f"between the steps of a burst: let it write to batch[{name!r}].clone()"
                )
