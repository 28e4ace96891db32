"""The modes of torch in which a step is called, whatever they are where its runner is."""

from __future__ import annotations

import torch

from ..buffers import BatchView
from ..errors import CaptureError
from ..outputs import Step, StepOutput


def require_no_autocast(kind: str) -> None:
    """Refuse to capture a step in autocast, in which replays would not be.

    Raises:
        CaptureError: when autocast is on for this kind of device.
    """
    if torch.is_autocast_enabled(kind):
        raise CaptureError(
            f"torch.autocast is on for {kind}, expected it to be entered by the step itself: a "
            "step is called without it, so that a graph, a miss and a verification do the same"
        )


def without_autocast(step: Step, kind: str) -> Step:
    """Return a step that is called without the caller's autocast.

    Autocast keeps copies of weights in 16 bits for as long as any block of it is open. A graph that
    is captured meanwhile has no casts, but the addresses of copies that go when the block is left.
    So there are none when a call begins.
    """

    def call(batch: BatchView) -> StepOutput:
        enabled = torch.is_autocast_enabled(kind)
        torch.set_autocast_enabled(kind, False)
        torch.clear_autocast_cache()
        try:
            return step(batch)
        finally:
            torch.clear_autocast_cache()
            torch.set_autocast_enabled(kind, enabled)

    return call
