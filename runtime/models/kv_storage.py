"""The memory of a paged KV cache: keys, values and scales of all layers, and moves of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..ops.attention.l2_partition import L2Partition
from ..ops.common.e4m3 import as_bytes
from .kv_format import KVFormat
from .l2.partitioned_memory import free_unused, partitioned_storage

_RANDOM_ELEMENTS = 1 << 26  # drawn at once


class LayerKV(NamedTuple):
    """Keys and values of one layer, as `ops.append_kv` writes them.

    Attributes:
        k: [pages, page_size, heads_kv, dim].
        v: likewise.
        k_scale: of an 8-bit cache: fp32 [] or [heads_kv] if static, [pages, page_size, heads_kv]
            per token.
        v_scale: likewise.
        k_scale_out: [pages, page_size, heads_kv], where static scales are written per token.
        v_scale_out: likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_scale_out: torch.Tensor | None = None
    v_scale_out: torch.Tensor | None = None

    @property
    def stored_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scales of keys and of values, as `ops.paged_attention` reads them."""
        if self.k_scale_out is None:
            return self.k_scale, self.v_scale
        return self.k_scale_out, self.v_scale_out


@dataclass(frozen=True)
class StoredPages:
    """Pages in host memory, bit for bit.

    Attributes:
        values: [layers, 2, n, page_size, heads_kv, dim], of the cache's dtype.
        scales: [layers, 2, n, page_size, heads_kv] fp32; None for a cache that stores none.
    """

    values: torch.Tensor
    scales: torch.Tensor | None


class KVStorage:
    """Keys and values of all layers in pages, and where they have scales, those.

    Args:
        shape: [layers, 2, pages, page_size, heads_kv, dim].
        kv_format: how numbers are stored.
        device: where.
        l2_partitioned: as of `PagedKVCache`.

    Attributes:
        values: of that shape, keys and values. All is zero at first, scales too.
        scales: [layers, 2, pages, page_size, heads_kv] fp32, or None.
        static_scales: [layers, 2] or [layers, 2, heads_kv] fp32, or None.
        l2_partition: where the pages are, if that is known.

    Raises:
        ValueError: for static scales of another shape.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        kv_format: KVFormat,
        device: torch.device | str,
        *,
        l2_partitioned: bool,
    ) -> None:
        self.format = kv_format
        self.scales: torch.Tensor | None = None
        self.static_scales: torch.Tensor | None = None
        self.l2_partition: L2Partition | None = None
        given = _static_scales(shape, kv_format)
        free_unused()
        # Made in inference mode it could not be written outside it.
        with torch.inference_mode(False):
            # Zeros, not garbage: padding rows of a captured step may read the dummy page.
            partitioned = (
                partitioned_storage(shape, kv_format.dtype, torch.device(device))
                if l2_partitioned
                else None
            )
            if partitioned is None:
                self.values = torch.zeros(shape, dtype=kv_format.dtype, device=device)
            else:
                self.values, self.l2_partition = partitioned
            if kv_format.stores_scales:
                self.scales = torch.zeros(shape[:-1], dtype=torch.float32, device=device)
            if given is not None:
                self.static_scales = given.to(device, copy=True)
            self._layers = [self._layer(index) for index in range(shape[0])]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all of the memory."""
        all_of_it = (self.values, self.scales, self.static_scales)
        return tuple(tensor for tensor in all_of_it if tensor is not None)

    def layer(self, index: int) -> LayerKV:
        """Return what is of one layer."""
        return self._layers[index]

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of all layers."""
        for tensor in self._paged():
            tensor[:, :, target] = tensor[:, :, source]

    def read(self, pages: Sequence[int]) -> StoredPages:
        """Return copies of pages in host memory."""
        pages = list(pages)
        values, *scales = (tensor[:, :, pages].cpu() for tensor in self._paged())
        return StoredPages(values.view(self.values.dtype), scales[0] if scales else None)

    def write(self, pages: Sequence[int], stored: StoredPages) -> None:
        """Write what `read` returned, and `check` accepts, to as many pages."""
        pages = list(pages)
        sources = [as_bytes(stored.values), *(() if stored.scales is None else (stored.scales,))]
        for tensor, source in zip(self._paged(), sources, strict=True):
            tensor[:, :, pages] = source.to(tensor.device)

    def check(self, stored: StoredPages, count: int) -> None:
        """Raise ValueError unless `stored` are `count` pages of such a cache."""
        values = self.values
        shape = (*values.shape[:2], count, *values.shape[3:])
        got = stored.values
        if (
            got.shape != shape
            or got.dtype != values.dtype
            or (stored.scales is None) != (self.scales is None)
        ):
            kinds = (stored.scales, self.scales)
            scales = ["without scales" if kind is None else "with scales" for kind in kinds]
            raise ValueError(
                f"swapped: got {tuple(got.shape)} {got.dtype} {scales[0]}, "
                f"expected {shape} {values.dtype} {scales[1]}"
            )

    @torch.no_grad()
    def randomize(
        self, pages: Sequence[int] | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Fill pages, by default all, with normal numbers, and with scales to go with their codes.

        Args:
            pages: which.
            generator: of random numbers, on the cache's device.
        """
        count = self.values.size(2)
        if pages is None:
            each = max(1, _RANDOM_ELEMENTS // self.values[:, :, 0].numel())
            slices = [slice(at, at + each) for at in range(0, count, each)]
        else:
            slices = [slice(page, page + 1) for page in pages]
        for some in slices:
            values = self.values[:, :, some]
            if not self.format.quantized:
                values.normal_(generator=generator)
                continue
            codes = torch.empty(values.shape, device=values.device).normal_(generator=generator)
            codes /= self._random_scales(some, generator)
            as_bytes(values).copy_(as_bytes(codes.clamp_(-127, 127).to(values.dtype)))

    def _random_scales(self, pages: slice, generator: torch.Generator | None) -> torch.Tensor:
        """Return what to divide values of pages by; where tokens have scales these are drawn."""
        if self.scales is not None:
            # No two alike, or a kernel that mixes them up would show nothing.
            scales = self.scales[:, :, pages].uniform_(0.02, 0.04, generator=generator)
            return scales.unsqueeze(-1)
        assert self.static_scales is not None, "8 bits have scales"
        layers = self.static_scales.size(0)
        return self.static_scales.reshape(layers, 2, 1, 1, -1, 1)

    def _paged(self) -> tuple[torch.Tensor, ...]:
        """Return what pages are made of, [layers, 2, pages, ...] each."""
        values = as_bytes(self.values)
        return (values,) if self.scales is None else (values, self.scales)

    def _layer(self, index: int) -> LayerKV:
        k, v = self.values[index]
        of_tokens = None if self.scales is None else self.scales[index]
        if self.static_scales is not None:
            static = self.static_scales[index]
            if of_tokens is None:
                return LayerKV(k, v, static[0], static[1])
            return LayerKV(k, v, static[0], static[1], of_tokens[0], of_tokens[1])
        return LayerKV(k, v) if of_tokens is None else LayerKV(k, v, of_tokens[0], of_tokens[1])


def _static_scales(shape: tuple[int, ...], kv_format: KVFormat) -> torch.Tensor | None:
    """Return the factors [layers, 2] or [layers, 2, heads_kv] on the CPU; None if not static."""
    if kv_format.scales != "static":
        return None
    layers, heads = shape[0], shape[4]
    if kv_format.k_scale is None or kv_format.v_scale is None:
        return torch.ones(layers, 2, device="cpu")
    for name, scale in (("k_scale", kv_format.k_scale), ("v_scale", kv_format.v_scale)):
        if scale.shape not in ((layers,), (layers, heads)):
            raise ValueError(
                f"{name}: got shape {list(scale.shape)}, expected [{layers}] or [{layers}, {heads}]"
            )
    k, v = (s.float().cpu() for s in (kv_format.k_scale, kv_format.v_scale))
    if k.ndim == v.ndim == 1:
        return torch.stack([k, v], dim=1)
    return torch.stack([s.reshape(layers, -1).expand(layers, heads) for s in (k, v)], dim=1)
