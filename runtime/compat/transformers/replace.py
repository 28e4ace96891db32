"""Giving submodules of a model another forward, where a trial says that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ...jit.errors import KernelError

Forward = Callable[..., Any]  # of a module, which is its first argument


def replace_forwards(
    model: torch.nn.Module, forward_of: Callable[[torch.nn.Module], Forward | None]
) -> list[str]:
    """Replace forwards of a model's submodules in place, and return whose.

    Modules whose forward is not their class's are left alone. Under the wrapper of compressed-
    tensors, which moves parameters and arguments to a device, the forward that it calls counts.

    Args:
        model: of transformers, or any other module.
        forward_of: returns a submodule's new forward, a function of a module of Python, None to
            leave it as it is.

    Returns:
        The names of the submodules, in the order of `named_modules`.

    Raises:
        TypeError: when `model` is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    replaced = []
    for name, module in model.named_modules():
        with _unwrapped(module):
            own = getattr(module.forward, "__func__", None)
        if own is not type(module).forward:
            continue
        if (forward := forward_of(module)) is not None:
            with _unwrapped(module):
                module.forward = _bound(forward, module)
            replaced.append(name)
    return replaced


def _bound(forward: Forward, module: torch.nn.Module) -> partial[Any]:
    """Return a module's forward as wrappers expect it, with the function as `__func__`.

    A bound method has that, too, but a pickled copy of the module would not: a method is pickled by
    its name, under which the class has another.
    """
    bound = partial(forward, module)
    vars(bound)["__func__"] = forward
    return bound


def _unwrapped(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Take the wrapper of compressed-tensors off a module's forward, where it has one."""
    if not hasattr(module, "_original_forward_func"):
        return nullcontext()
    from compressed_tensors.offload.module import unwrap_offload_forward

    unwrapped: AbstractContextManager[None] = unwrap_offload_forward(module)
    return unwrapped


def remove_wrappers(model: torch.nn.Module) -> None:
    """Take off what compressed-tensors wraps a model in, once nothing in it needs that.

    Its hook decompresses what is quantised at the first forward, and its wrappers look at every
    argument and parameter of every module, which no compiler can trace. They stay while a module
    is quantised by that library, or lies on another device than it computes on.
    """
    modules = [*model.modules()]
    if any(hasattr(module, "quantization_scheme") for module in modules):
        return
    if (hook := getattr(model, "ct_decompress_hook", None)) is not None:
        hook.remove()
        del model.ct_decompress_hook
    wrapped: list[Any] = [m for m in modules if hasattr(m, "_original_forward_func")]
    tensors = [m._parameters for m in wrapped]
    if not wrapped or any(t.onload_device != t.offload_device for t in tensors):
        return
    from compressed_tensors.offload.module import remove_module_offload

    for module in wrapped:
        forward = module._original_forward_func
        remove_module_offload(module)
        del module.forward
        if forward is not type(module).forward:
            module.forward = _bound(forward, module)


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
