"""Random operands of products, in as many sets as it takes to keep the L2 cold."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ... import ops
from ...ops.common.sizes import ceil_div
from ...ops.linear.block_scales import aligned_scales
from ...ops.linear.gemm_operands import row_stride
from ...ops.linear.gemm_variants import BLOCK_E4M3
from ...ops.linear.quantize_cuda import GROUP
from ..harness.rotation import num_sets
from .cases import Case, Shape

OPERANDS = {
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    BLOCK_E4M3: torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
}
OUT_DTYPE = torch.bfloat16
# Codes of ±127 times these give e4m3 values that use most of its exponents.
_X_STEP, _W_STEP = 0.02, 0.08


@dataclass(frozen=True)
class Layout:
    """The operands and the result of an implementation.

    Args:
        operand: dtype of x and w, in `OPERANDS`.
        scaled: whether the result is scaled by x_scale and w_scale.
        out_bytes: of an element of the result.
    """

    operand: str
    scaled: bool = True
    out_bytes: int = OUT_DTYPE.itemsize


@dataclass(frozen=True)
class Weight:
    """One weight: `plain` [n, k], `packed` for our kernels, and its scales in fp32.

    `scale` is [n]; with block scales it is that of `ops.fp8_block_linear`, and `blocks`
    [ceil(n / 128), ceil(k / 128)] holds what it was made of.
    """

    plain: torch.Tensor
    packed: ops.PackedWeight
    scale: torch.Tensor
    blocks: torch.Tensor | None = None

    @property
    def scale_stride(self) -> int:
        """Elements between two scales, or rows of scales, as a launch takes them."""
        return row_stride(self.scale) if self.blocks is not None else 1


@dataclass(frozen=True)
class Inputs:
    """Tensors of one launch; ours writes `out`: x [m, k], x_scale fp32, out [m, n].

    x_scale is [m]; with block scales [ceil(k / 128), m].
    """

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: Weight
    out: torch.Tensor

    @property
    def x_scale_stride(self) -> int:
        """Likewise, of x_scale."""
        return row_stride(self.x_scale) if self.weight.blocks is not None else 1


def inputs(
    cases: Sequence[Case], layouts: Sequence[Hashable], device: torch.device
) -> Iterator[tuple[Case, Iterator[Mapping[Hashable, Sequence[Inputs]]]]]:
    """Yield the cases, each with one group of inputs for all layouts.

    Args:
        cases: in the order of their shapes, whose weights are kept from one to the next.
        layouts: of type `Layout`.
        device: where the inputs shall lie.
    """
    by_layout: dict[Hashable, str] = {
        layout: layout.operand for layout in layouts if isinstance(layout, Layout)
    }
    operands = dict.fromkeys(by_layout.values())
    for shape, of_shape in groupby(cases, lambda case: case.shape):
        weights = random_weights(shape, operands, device)
        for case in of_shape:
            yield case, _one_group(case, weights, by_layout)
        del weights
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the pools of this shape's graphs


def _one_group(
    case: Case, weights: dict[str, list[Weight]], by_layout: Mapping[Hashable, str]
) -> Iterator[Mapping[Hashable, Sequence[Inputs]]]:
    sets = random_inputs(case, weights)
    group = {layout: sets[operand] for layout, operand in by_layout.items()}
    del sets
    yield group


def random_weights(
    shape: Shape, operands: Collection[str], device: torch.device
) -> dict[str, list[Weight]]:
    """Return the sets of weights of each operand dtype; all of them hold the same codes.

    Args:
        shape: of the weights.
        operands: names in `OPERANDS`.
        device: where they shall lie.
    """
    found: dict[str, list[Weight]] = {name: [] for name in operands}
    for _ in range(num_sets(shape.n * shape.k, device)):
        codes = _codes(shape.n, shape.k, device)
        scale = _scale(shape.n, device)
        for name, weights in found.items():
            plain = _as_operand(codes, name, _W_STEP)
            packed = ops.pack_weight(plain)
            if name == BLOCK_E4M3:
                blocks = _scales(ceil_div(shape.n, GROUP), ceil_div(shape.k, GROUP), device)
                of_channels = ops.channel_scales([(blocks, slice(0, shape.n))])
                weights.append(Weight(plain, packed, of_channels, blocks))
            else:
                weights.append(Weight(plain, packed, scale))
    return found


def random_inputs(case: Case, weights: dict[str, list[Weight]]) -> dict[str, list[Inputs]]:
    """Return inputs for each set of weights, with activations of their own."""
    found: dict[str, list[Inputs]] = {name: [] for name in weights}
    for same in zip(*weights.values(), strict=True):
        device = same[0].plain.device
        codes = _codes(case.m, case.shape.k, device)
        scale = _scale(case.m, device)
        of_groups = aligned_scales(_scales(ceil_div(case.shape.k, GROUP), case.m, device))
        out = torch.empty(case.m, case.shape.n, dtype=OUT_DTYPE, device=device)
        for name, weight in zip(weights, same, strict=True):
            x_scale = of_groups if name == BLOCK_E4M3 else scale
            found[name].append(Inputs(_as_operand(codes, name, _X_STEP), x_scale, weight, out))
    return found


def _codes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=device)


def _scale(rows: int, device: torch.device) -> torch.Tensor:
    return _scales(1, rows, device)[0]


def _scales(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.rand(rows, columns, device=device) * 1e-2 + 1e-3


def _as_operand(codes: torch.Tensor, name: str, step: float) -> torch.Tensor:
    if name == "int8":
        return codes
    return (codes.to(torch.bfloat16) * step).to(OPERANDS[name])
