"""Memory that a caller declares: what a step works on besides its buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

DeclaredMemory = Mapping[str, torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]]


def kept_alive(memory: DeclaredMemory) -> DeclaredMemory:
    """Return the same, safe to go through again and again.

    Raises:
        TypeError: when something in it is not a tensor and has none, or one is sparse.
    """
    if not isinstance(memory, Mapping):
        raise TypeError(f"memory: got {type(memory).__name__}, expected a mapping")
    tensors = {name: tuple(tensors_of(name, holder)) for name, holder in memory.items()}
    # A module may be moved before it is captured, so its tensors are asked for then.
    return {
        name: holder if isinstance(holder, torch.nn.Module) else tensors[name]
        for name, holder in memory.items()
    }


def tensors_of(name: str, holder: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of what was declared as `name`.

    Raises:
        TypeError: when it is not a tensor and has none, or one is sparse.
    """
    if isinstance(holder, torch.Tensor):
        if holder.layout is not torch.strided:
            raise TypeError(f"memory[{name!r}]: got {holder.layout}, expected strided tensors")
        yield holder
    elif isinstance(holder, torch.nn.Module):
        for tensor in (*holder.parameters(), *holder.buffers()):
            yield from tensors_of(name, tensor)
    elif isinstance(holder, Iterable) and not isinstance(holder, (str, bytes)):
        for item in holder:
            yield from tensors_of(name, item)
    else:
        raise TypeError(f"memory[{name!r}]: got {type(holder).__name__}, expected tensors")


def stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a tensor's elements: itself, or what it wraps, as a DTensor.

    What is uninitialised after the warm-up holds nothing, and is in no graph.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from stored(getattr(tensor, name))
