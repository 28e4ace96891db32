"""Launches that are noted instead of made, to see a kernel's arguments without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch

STREAM = 77


class Launches(list[dict[str, Any]]):
    """What would have been launched: the kernel's arguments and its `variant`."""


def note_launches(monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> Launches:
    """Return what the modules, which launch kernels on the stream `STREAM`, launch from now on."""
    seen = Launches()

    class Library:
        def __init__(self, variant: Any) -> None:
            self._variant = variant

        def launch(self, **arguments: Any) -> None:
            seen.append({"variant": self._variant, **arguments})

    def load(variant: Any, *, device: int, stream: int) -> Library:
        assert stream == STREAM
        return Library(variant)

    for module in modules:
        monkeypatch.setattr(module, "load", load)
        monkeypatch.setattr(module, "current_stream", lambda device: STREAM)
        monkeypatch.setattr(module, "on_device", lambda device: torch.no_grad())
    return seen
