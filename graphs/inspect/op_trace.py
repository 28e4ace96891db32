"""Watches a captured step operator by operator, to say in which one a capture fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..failures import Call, Trace
from .diagnosis import line_of_stack


class OperatorWatch(TorchDispatchMode):
    """A context that notes each operator of torch, and the first after which the capture is over.

    For diagnosis only: code made by torch.compile may run otherwise inside of it.

    Args:
        is_valid: whether the capture can still succeed.
        is_captured: whether the current stream is being captured.
        device_type: of the operators that belong into the graph.
    """

    def __init__(
        self,
        is_valid: Callable[[], bool],
        is_captured: Callable[[], bool],
        device_type: str = "cuda",
    ) -> None:
        super().__init__()
        self._is_valid = is_valid
        self._is_captured = is_captured
        self._device_type = device_type
        self._last: Call | None = None
        self._failed: Call | None = None
        self._between: tuple[Call | None, Call | None] | None = None
        self._outside: dict[Call, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator, and look at the capture before and after it."""
        call = Call(str(func), line_of_stack(sys._getframe(1)))
        self._look_between(call)
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self._note_failure(call)
            raise
        if not self._is_valid():
            self._note_failure(call)
        elif not self._is_captured() and self._is_on_device((args, kwargs, result)):
            self._outside[call] = None
        self._last = call
        return result

    def finish(self, error: Exception | None) -> Trace:
        """Return what was seen, after the step has returned or raised `error`."""
        if error is None:
            self._look_between(None)
        return Trace(self._failed, self._between, tuple(self._outside), error)

    def _look_between(self, call: Call | None) -> None:
        if self._failed is None and self._between is None and not self._is_valid():
            self._between = self._last, call

    def _note_failure(self, call: Call) -> None:
        if self._failed is None and self._between is None:
            self._failed = call

    def _is_on_device(self, values: Any) -> bool:
        return any(
            isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type
            for leaf in tree_leaves(values)
        )
