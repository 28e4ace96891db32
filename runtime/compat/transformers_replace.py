"""Giving submodules of a model another forward, where a trial says that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..jit.errors import KernelError


def replace_forwards(
    model: torch.nn.Module,
    forward_of: Callable[[torch.nn.Module], partial[Any] | None],
) -> list[str]:
    """Replace forwards of a model's submodules in place, and return whose.

    Args:
        model: of transformers, or any other module.
        forward_of: returns a submodule's new forward, None to leave it as it is. Not a bound
            method: what copies or pickles the module takes a partial along with it.

    Returns:
        The names of the submodules, in the order of `named_modules`.

    Raises:
        TypeError: when `model` is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    replaced = []
    for name, module in model.named_modules():
        if (forward := forward_of(module)) is not None:
            module.forward = forward
            replaced.append(name)
    return replaced


@torch.no_grad()
def is_known_to_agree(trial: Callable[[], bool]) -> bool:
    """Return what a trial says; one that raises, for whatever reason, does not say that it agrees.

    Raises:
        KernelError: of the trial: it says nothing about what is tried.
    """
    try:
        return trial()
    except KernelError:
        raise
    except Exception:
        return False
