"""Inputs and comparisons shared by the tests of the ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ostinato.ops import reference

E4M3 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ABSURD_PAGE = 2147480000


def assert_close(
    actual: torch.Tensor,
    twin: Callable[[torch.dtype], torch.Tensor],
    *,
    rounded_once: bool = True,
) -> None:
    """Demand the accuracy of fp32 arithmetic that is rounded once, and twice torch's at most.

    `twin` computes the op's reference in the precision it is given; fp64 counts as exact. What is
    granted on top are a few fp32 roundings, for where torch happens to make none. Kernels that
    multiply 16-bit weights are not `rounded_once`: only the second counts.
    """
    exact = twin(torch.float64)

    def torch_error(dtype: torch.dtype) -> torch.Tensor:
        return 2 * (twin(dtype).double() - exact).abs().amax()

    assert actual.shape == exact.shape
    assert actual.isfinite().all()
    if not actual.numel():
        return
    error = (actual.double() - exact).abs()
    slack = 4 * torch.finfo(torch.float32).eps * exact.abs().amax().clamp(min=1)
    assert (error.amax() <= torch_error(actual.dtype) + slack).all()
    if not rounded_once:
        return
    unit = torch.finfo(actual.dtype)
    rounding = (exact.abs() * unit.eps / 2).clamp(min=unit.smallest_normal * unit.eps)
    assert (error <= rounding * 1.01 + torch_error(torch.float32) + slack).all()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Demand equality of dtype, shape and bits (NaN equals NaN of the same bits)."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    as_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    assert torch.equal(actual.contiguous().view(as_bits), expected.contiguous().view(as_bits))


def dequantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 8-bit keys or values [..., heads, dim] in 16 bits, as prompts attend to them."""
    return reference.dequantized(x, scale, torch.float32).to(dtype)


def int32(values: list[int] | tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def quantized_randn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random values of any dtype, int8 over its whole range."""
    if dtype is torch.int8:
        return torch.randint(-127, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(dtype)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return x [pages, page_size, heads, dim], or a tensor of one dimension less, restrided."""
    if layout == "dense":
        return x
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    padded = torch.empty(*x.shape[:-2], 2 * x.size(-2), x.size(-1) + 3, dtype=x.dtype)
    padded.view(torch.int8 if x.itemsize == 1 else x.dtype).fill_(77)
    view = padded.to(x.device)[..., ::2, : x.size(-1)]
    view.copy_(x)
    return view


@dataclass(frozen=True)
class PagedCase:
    """One call of `paged_attention`; see `build`."""

    k_lens: tuple[int, ...] = (1, 7, 16, 33)
    q_lens: tuple[int, ...] | None = None
    max_seqlen_q: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    dim: int = 16
    value_dim: int | None = None
    page_size: int = 8
    scale: float | None = None
    causal: bool = True
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    scale_kind: str = "head"
    layout: str = "dense"

    def build(self, device: torch.device) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Return (positional arguments, keyword arguments).

        Everything a result must not depend on is poisoned: slots past the ends, slots before all
        windows and spare pages are NaN (in int8 caches the extreme value), and the table entries
        of whole such pages are absurd.
        """
        batch, page_size = len(self.k_lens), self.page_size
        q_lens = self.q_lens or (self.max_seqlen_q,) * batch
        counts = [-(-length // page_size) for length in self.k_lens]
        order = torch.randperm(sum(counts) + 3).tolist()
        pages = len(order)
        table = torch.full((batch, max(counts) + 2), ABSURD_PAGE, dtype=torch.int32)
        unused = torch.ones(pages, page_size, dtype=torch.bool)
        for b, (length, count) in enumerate(zip(self.k_lens, counts, strict=True)):
            own = [order.pop() for _ in range(count)]
            first = self.first_seen(length, q_lens[b])
            page = first // page_size if first < length else count
            table[b, page:count] = torch.tensor(own[page:], dtype=torch.int32)
            slot = torch.arange(count * page_size).view(count, page_size)
            unused[own] = (slot < first) | (slot >= length)

        cache_dtype = self.cache_dtype or self.dtype
        caches, scales = [], {}
        for name, dim in (("k_scale", self.dim), ("v_scale", self.value_dim or self.dim)):
            shape = (pages, page_size, self.heads_kv, dim)
            cache = quantized_randn(shape, cache_dtype)
            if cache_dtype is torch.int8:
                cache[unused] = -128
            else:
                cache = cache.float().masked_fill(unused[..., None, None], math.nan)
                cache = cache.to(cache_dtype)
            caches.append(laid_out(cache.to(device), self.layout))
            if cache_dtype.itemsize == 1:
                scale = self._scale(shape) / (64 if cache_dtype is torch.int8 else 1)
                if scale.ndim == 3:
                    scale[unused] = math.nan
                    if self.layout == "strided":  # beside others, as in rows of one buffer
                        scale = torch.stack([torch.full_like(scale, math.nan), scale], -1)[..., 1]
                scales[name] = scale.to(device)

        fused = torch.randn(sum(q_lens), self.heads_q + 2 * self.heads_kv, self.dim)
        q = fused.to(self.dtype).to(device)[:, : self.heads_q]
        options: dict[str, Any] = {
            "max_seqlen_q": max(q_lens),
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            **scales,
        }
        if self.q_lens is not None:
            offsets = [sum(q_lens[:b]) for b in range(batch + 1)]
            options["cu_seqlens_q"] = int32(offsets, device)
        if self.sinks:
            options["sinks"] = torch.randn(self.heads_q).to(device)
        return (q, *caches, table.to(device), int32(self.k_lens, device)), options

    def first_seen(self, k_len: int, q_len: int) -> int:
        """Return the first key that any of a sequence's queries sees; k_len if there is none."""
        if q_len == 0:
            return k_len
        if self.window is None or self.window[0] < 0:
            return 0
        return max(0, k_len - q_len - self.window[0])

    def _scale(self, shape: tuple[int, ...]) -> torch.Tensor:
        sizes = {"scalar": (), "one": (1,), "head": shape[2:3], "token": shape[:3]}
        return torch.rand(sizes[self.scale_kind]) + 0.5

    def twin(self, args: Any, options: Any) -> Callable[[torch.dtype], torch.Tensor]:
        """Return the reference's output as a function of its precision."""
        return lambda dtype: reference.paged_attention(*args, **options, dtype=dtype)[0]

    def __str__(self) -> str:
        plain = replace(PagedCase())
        fields = {k: v for k, v in vars(self).items() if v != vars(plain)[k]}
        return ",".join(f"{k}={v}" for k, v in fields.items()) or "plain"


def packed(
    q_lens: tuple[int, ...],
    k_lens: tuple[int, ...] | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> list[Any]:
    """Return the arguments of `varlen_attention`; rows that no sequence owns are NaN."""
    device = torch.device("cuda") if device is None else device
    k_lens = q_lens if k_lens is None else k_lens
    tensors = []
    for lens, count, size in (
        (q_lens, heads[0], dim),
        (k_lens, heads[1], dim),
        (k_lens, heads[1], value_dim or dim),
    ):
        rows = torch.full((sum(lens) + 3, 2 * count, size), math.nan, dtype=dtype, device=device)
        rows[: sum(lens), :count] = torch.randn(sum(lens), count, size, device=device)
        tensors.append(rows[:, :count])
    tensors[0] = tensors[0][: sum(q_lens)]
    offsets = [
        int32([sum(lens[:b]) for b in range(len(lens) + 1)], device) for lens in (q_lens, k_lens)
    ]
    return [*tensors, *offsets, max(q_lens), max(k_lens)]
