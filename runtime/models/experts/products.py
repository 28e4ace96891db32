"""Grouped products: the linear layers of all experts of a layer, each for the rows routed to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ... import ops
from ...jit.variant import Variant
from ...ops.common.device import KERNEL_NAMES
from ...ops.linear import block_scales
from ...ops.linear.block_scales import SCALE_CHANNELS
from ...ops.linear.quantize_cuda import GROUP, input_kernel
from ...ops.moe.moe_linear import runs_experts_kernel
from ...ops.moe.moe_linear_cuda import QUANTIZED_TILE, MoeLinear
from ...ops.moe.plan import TILE_TOKENS
from ..layers import tensors_of


class Experts(Protocol):
    """The products y = x·Wᵀ of the experts of a layer, however their weights are stored.

    Gated ones, [gate | up], read tokens: they map x [T, K] to silu(gate) · up [T·top_k, N / 2], the
    rows of experts. The others read such rows, and map them to slots [T, top_k, N]. See
    `ops.moe_linear`. Classes that are dataclasses inherit what is not their own.
    """

    gated: bool

    @property
    def num_experts(self) -> int:
        """How many products there are."""

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of each expert."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype in which the weights are stored."""

    def __call__(
        self, x: torch.Tensor, plan: ops.MoePlan, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the products of the rows that a plan gives each expert.

        Args:
            x: [T, K] if gated, otherwise [T·top_k, K]; 16- or 32-bit.
            plan: the routing of the tokens.
            n_active: int32 [1] on the device, how many of the T tokens are real.
        """

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor of the products."""
        return tensors_of(self)

    def kernels(self, dtype: torch.dtype) -> list[Variant]:
        """Return the kernels that are launched for any number of rows; `dtype` is that of x."""


@dataclass
class _StoredExperts(Experts):
    """What all classes have in common.

    `weight` [experts, N, K], packed for GPUs with kernels for it: a plain one is packed here. All
    tensors are constants from then on (see `ops.moe_linear`).
    """

    weight: torch.Tensor | ops.PackedExperts
    gated: bool

    def __post_init__(self) -> None:
        if isinstance(self.weight, torch.Tensor) and runs_experts_kernel(self.weight):
            self.weight = ops.pack_experts(self.weight, gated=self.gated)

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[1], self.weight.shape[2]

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weight.dtype

    def _rows(self, plan: ops.MoePlan, n_active: torch.Tensor | None) -> torch.Tensor | None:
        """Return how many rows of the input are real, on the device."""
        return n_active if self.gated else plan.n_rows

    def _multiply(
        self,
        x: torch.Tensor,
        plan: ops.MoePlan,
        out_dtype: torch.dtype,
        x_scale: torch.Tensor | None = None,
        w_scale: torch.Tensor | None = None,
        *,
        power_of_two: bool = False,
        n_active: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return ops.moe_linear(
            x,
            self.weight,
            plan,
            to="experts" if self.gated else "slots",
            x_scale=x_scale,
            w_scale=w_scale,
            activation="silu_mul" if self.gated else None,
            out_dtype=out_dtype,
            power_of_two=power_of_two,
            n_active=n_active,
            # Rows of experts come from the first product, or from what quantises them.
            early=not self.gated,
        )


@dataclass
class DenseExperts(_StoredExperts):
    """Products with 16- or 32-bit weights in x's dtype."""

    def __call__(
        self, x: torch.Tensor, plan: ops.MoePlan, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply(x, plan, x.dtype)

    def kernels(self, dtype: torch.dtype) -> list[Variant]:
        return experts_kernels(dtype, dtype, dtype)


@dataclass
class W8A8Experts(_StoredExperts):
    """Products with 8-bit weights, of which each row has a scale, and inputs quantised per row.

    `weight_scale` [experts, N] fp32. Inputs are quantised per token at run time, or by the fixed
    fp32 scalar `input_scale`.
    """

    weight_scale: torch.Tensor
    out_dtype: torch.dtype
    input_scale: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, plan: ops.MoePlan, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, scale = self._rows(plan, n_active), None
        if self.input_scale is not None:
            scale = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
            x = ops.quantize_per_tensor(
                x, self.input_scale, self.weight.dtype, n_active=rows, scale_out=scale
            )
        given = (x, plan, self.out_dtype, scale, self.weight_scale)
        return self._multiply(*given, n_active=rows)

    def kernels(self, dtype: torch.dtype) -> list[Variant]:
        return experts_kernels(self.weight_dtype, dtype, self.out_dtype)


@dataclass
class BlockFP8Experts(_StoredExperts):
    """Products with e4m3 weights in blocks of 128 by 128, and inputs in groups of 128.

    `weight_scale` fp32 [experts, ceil(K / 128), columns] (`ops.channel_scales` of each). Inputs are
    quantised by groups at run time, with `power_of_two` by scales that are such.
    """

    weight_scale: torch.Tensor
    out_dtype: torch.dtype
    power_of_two: bool = False

    def __call__(
        self, x: torch.Tensor, plan: ops.MoePlan, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply(
            *(x, plan, self.out_dtype, None, self.weight_scale),
            power_of_two=self.power_of_two,
            n_active=self._rows(plan, n_active),
        )

    def kernels(self, dtype: torch.dtype) -> list[Variant]:
        shared = block_scales.scale_channels(self.weight_scale[0], self.shape[0])
        return experts_kernels(self.weight_dtype, dtype, self.out_dtype, scale_channels=(shared,))


def experts_kernels(
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    *,
    scale_channels: Sequence[int] = (),
) -> list[Variant]:
    """Return what grouped products launch for any number of rows.

    Args:
        weight_dtype: of the weights.
        dtype: of what is multiplied by them, before it is quantised.
        out_dtype: of the results.
        scale_channels: of weights with scales of blocks, how many channels may share one.
    """
    found: list[Variant] = []
    if weight_dtype != dtype:
        group = GROUP if scale_channels else 0
        found.append(input_kernel("per_token", dtype, weight_dtype, group))
    if weight_dtype is not torch.float32:
        names = (KERNEL_NAMES[weight_dtype], KERNEL_NAMES[out_dtype])
        kinds = [(tokens, "") for tokens in TILE_TOKENS]
        if weight_dtype.itemsize < dtype.itemsize == out_dtype.itemsize == 2:
            kinds.append((QUANTIZED_TILE, KERNEL_NAMES[dtype]))
        found += [
            MoeLinear(
                dtype=names[0],
                out_dtype=names[1],
                tokens=tokens,
                block_scales=bool(scale_channels),
                scale_channels=shared,
                x_dtype=x_dtype,
            )
            for shared in scale_channels or (SCALE_CHANNELS,)
            for tokens, x_dtype in kinds
        ]
    return found
