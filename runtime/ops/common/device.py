"""What every launch of our kernels asks torch: the GPU, the current device and its stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from ...jit.targets import capability_of
from ...jit.variant import Variant

# The names that `ostinato.jit.variant` gives to torch's dtypes.
KERNEL_NAMES = {
    torch.int8: "int8",
    torch.float8_e4m3fn: "e4m3",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
_AS_IT_IS = nullcontext()


@cache
def _gpu(device: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count


def gpu(device: int) -> tuple[str, int]:
    """Return the name of a GPU and how many multiprocessors it has."""
    return _gpu(device)


@cache
def _runs(family: type[Variant], device: int) -> bool:
    return family.supports(capability_of(device))


def runs(family: type[Variant], device: int) -> bool:
    """Return whether a GPU runs kernels of a family; torch's operators serve where it does not."""
    return _runs(family, device)


# torch.compile takes their answers for constants: it cannot trace questions to the driver. This is
# what `torch.compiler.assume_constant_result` does, which would import the compiler.
for _constant in (gpu, runs):
    _constant.__dict__["_dynamo_marked_constant"] = True


def has_kernel(family: type[Variant], x: torch.Tensor) -> bool:
    """Return whether kernels of a family run where a tensor is."""
    return x.is_cuda and runs(family, x.get_device())


def device_index(device: torch.device) -> int:
    """Return the index of a CUDA device; without one of its own, that of the current device."""
    return torch.cuda.current_device() if device.index is None else device.index


def on_device(device: int) -> AbstractContextManager[object]:
    """Return a context in which a device is the current one, as launches want it."""
    return _AS_IT_IS if torch.cuda.current_device() == device else torch.cuda.device(device)


def address_of(x: torch.Tensor | None) -> int:
    """Return the address of a tensor's first element; None is null."""
    return 0 if x is None else x.data_ptr()


def address_of_row(x: torch.Tensor, row: int) -> int:
    """Return the address of x[row], without the view that would take the host longer."""
    return x.data_ptr() + row * x.stride(0) * x.element_size()


def in_vectors(x: torch.Tensor, size: int) -> bool:
    """Return whether rows of x, whose last dimension is dense, begin at multiples of `size` bytes.

    Each must have an address of its own, too: TMA takes no step of 0.
    """
    if x.data_ptr() % size:
        return False
    element, sizes = x.element_size(), x.shape
    for dimension, stride in enumerate(x.stride()[:-1]):
        if stride * element % size or (stride == 0 and sizes[dimension] > 1):
            return False
    return True


def heads_of(x: torch.Tensor | None, row: int = 0) -> tuple[int, int, int]:
    """Return the address and strides of heads [tokens, heads, dim or nothing] from a row on.

    None is null.
    """
    return (0, 0, 0) if x is None else (address_of_row(x, row), x.stride(0), x.stride(1))


def slots_of(x: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Return the address and strides of a paged cache, or of its scales; None is null.

    Scales that many tokens share, a scalar or one for each head, have strides of 0 for them.
    """
    if x is None:
        return (0, 0, 0, 0)
    if x.ndim == 4:
        page_stride, stride, head_stride, _ = x.stride()
        return (x.data_ptr(), page_stride, stride, head_stride)
    if x.numel() == 1:
        return (x.data_ptr(), 0, 0, 0)
    if x.ndim == 1:
        return (x.data_ptr(), 0, 0, x.stride(0))
    return (x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream."""
    # torch.cuda.current_stream() makes an object of it, which takes longer than the launch.
    return torch._C._cuda_getCurrentRawStream(device)
