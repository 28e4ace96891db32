"""Torch's switches for faster, less exact fp32 matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ops_cases import E4M3, PagedCase, assert_same_bits, int32, quantized_randn

from ostinato import ops


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def linear(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x, w = (torch.linspace(-1, 1, n * 32, device=device).view(n, 32).to(dtype) for n in (3, 5))
    return ops.linear(x, w)


def w8a8(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x, w = (quantized_randn((n, 32), dtype).to(device) for n in (3, 5))
    one = torch.ones((), device=device)
    return ops.w8a8_linear(x, w, one, one)


def paged(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    args, options = PagedCase(dtype=dtype).build(device)
    return ops.paged_attention(*args, **options)


def varlen(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    q = torch.linspace(-1, 1, 96, device=device).view(3, 2, 16).to(dtype)
    cu = int32([0, 3], device)
    return ops.varlen_attention(q, q, q, cu, cu, 3, 3)


HALVES = (torch.float16, torch.bfloat16)
CALLS = {
    "linear": lambda device: linear(torch.float32, device),
    "paged_attention": lambda device: paged(torch.float32, device),
    "varlen_attention": lambda device: varlen(torch.float32, device),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_precision_is_refused(
    call: Callable[[torch.device], torch.Tensor], precision: str, device: torch.device
) -> None:
    expected = call(device)
    torch.set_float32_matmul_precision(precision)
    with pytest.raises(RuntimeError, match=r"matmul.*: got '(tf32|bf16)', expected fp32 products"):
        call(device)
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    assert call(device).shape == expected.shape


@pytest.mark.parametrize("dtype", [torch.float16, E4M3], ids=str)
def test_operands_that_the_cpu_widens_count_as_fp32(dtype: torch.dtype) -> None:
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(RuntimeError, match="got 'bf16'"):
        (w8a8 if dtype is E4M3 else linear)(dtype, torch.device("cpu"))


def test_products_of_other_dtypes_are_not_concerned(device: torch.device) -> None:
    def results() -> list[torch.Tensor]:
        torch.manual_seed(1)
        found = [w8a8(torch.int8, device)]
        if device.type == "cuda":
            # Of attention, what our kernels do: torch's products have no part in it.
            calls = (linear, paged, varlen)
            found += [call(dtype, device) for call in calls for dtype in HALVES]
            found.append(w8a8(E4M3, device))
        return found

    expected = results()
    torch.set_float32_matmul_precision("medium")
    for result, before in zip(results(), expected, strict=True):
        assert_same_bits(result, before)
