"""FP8 weights with a scale per block of 128 by 128, and FP8 activations in groups of 128."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ... import ops
from ...jit.variant import Variant
from ...models.block_linear import BlockFP8Linear
from ...models.experts.products import BlockFP8Experts, experts_kernels
from ...models.kinds import InputKind
from ...models.modules import Module, TensorSpec
from ...models.parts import ExpertsPart
from ...ops.common.sizes import ceil_div
from ...ops.linear.block_scales import SCALE_CHANNELS, check_channels
from ...ops.linear.precompile import block_kernels
from ..errors import UnsupportedCheckpointError
from ..reader import CheckpointReader
from ..scales import read_scale
from .base import StoredScheme, Target, biases, stack, weight_of

BLOCK = 128


@dataclass(frozen=True)
class FP8BlockScheme(StoredScheme):
    """Block FP8 storage of one linear module: e4m3 weights, and a scale for each block of them.

    A block is 128 rows by 128 columns; those at the edges may be smaller. Activations are quantised
    at run time, each 128 of a token with a scale of their own, with `power_of_two` rounded up to
    such.
    """

    power_of_two: bool = False
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    def __str__(self) -> str:
        """Return what messages say of it."""
        scales = "powers of two" if self.power_of_two else "any numbers"
        return f"FP8 in blocks of {BLOCK} by {BLOCK}, scales of activations {scales}"

    def weight(self, module: Module) -> TensorSpec:
        """Return the weight [rows, columns]."""
        return module.tensor("weight", (module.rows, module.columns), dtypes=(self.dtype,))

    def weight_scale(self, module: Module) -> TensorSpec:
        """Return the scale of each block."""
        rows, columns = ceil_div(module.rows, BLOCK), ceil_div(module.columns, BLOCK)
        # The first spelling is that of DeepSeek and transformers; both are factors, not divisors.
        names = ("weight_scale_inv", "weight_scale")
        # The second shape is that of ModelOpt.
        return module.tensor(names, (rows, columns), (rows, 1, columns, 1))

    def tensors(self, module: Module) -> Iterator[TensorSpec]:
        """Yield every tensor of the module; the weight is the first."""
        yield self.weight(module)
        yield self.weight_scale(module)
        if module.bias is not None:
            yield module.bias

    def kernels(
        self,
        kind: InputKind,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        batch_invariant: bool,
        device: torch.device | None,
        out_dtype: torch.dtype | None = None,
    ) -> list[Variant]:
        """Return what quantises the layer's input and multiplies it."""
        return block_kernels(
            kind,
            shape,
            dtype,
            out_dtype=out_dtype,
            batch_invariant=batch_invariant,
            device=device,
        )

    def check_shares(self, modules: Sequence[Module]) -> None:
        """Check that columns are divided where blocks end, and rows as finely as kernels can."""
        for module in modules:
            _check_columns(module)
        try:
            check_channels([module.kept_rows or slice(0, module.rows) for module in modules])
        except ValueError as error:
            names = ", ".join(dict.fromkeys(module.name for module in modules))
            raise UnsupportedCheckpointError(f"{names}: {error}") from error

    def build(
        self, reader: CheckpointReader, modules: Sequence[Module], target: Target
    ) -> BlockFP8Linear:
        """Return the layer: the rows of each module keep the blocks that they have in the file.

        Raises:
            UnsupportedCheckpointError: naming the module, where a rank's part of it, or a module
                that others follow, would divide blocks more finely than kernels can.
        """
        self.check_shares(modules)
        bias = biases(reader, modules, target)
        weights = [weight_of(module, self.weight(module)) for module in modules]
        weight = stack(reader, weights, self.dtype, target.device)
        return BlockFP8Linear(
            weight=weight,
            weight_scale=self._scales(reader, modules).to(target.device),
            out_dtype=target.results,
            bias=bias,
            power_of_two=self.power_of_two,
            batch_invariant=target.batch_invariant,
        )

    def build_experts(
        self, reader: CheckpointReader, part: ExpertsPart, target: Target
    ) -> BlockFP8Experts:
        """Return the grouped products; the rows of each module keep their blocks."""
        products = tuple(part.products())
        for modules in products:
            self.check_shares(modules)
        weights = [weight_of(module, self.weight(module)) for module in part.stored()]
        weight = stack(reader, weights, self.dtype, target.device)
        scales = [self._scales(reader, modules) for modules in products]
        return BlockFP8Experts(
            weight=weight.view(part.num_experts, *part.shape),
            gated=part.gated,
            weight_scale=torch.stack(scales).to(target.device),
            out_dtype=target.results,
            power_of_two=self.power_of_two,
        )

    def experts_kernels(self, dtype: torch.dtype, *, out_dtype: torch.dtype) -> list[Variant]:
        """Return what the products launch."""
        either = (SCALE_CHANNELS, BLOCK)
        return experts_kernels(self.dtype, dtype, out_dtype, scale_channels=either)

    def _scales(self, reader: CheckpointReader, modules: Sequence[Module]) -> torch.Tensor:
        """Return the scales of a product's channels; see `ops.channel_scales`."""
        return ops.channel_scales([self._blocks(reader, module) for module in modules])

    def _blocks(self, reader: CheckpointReader, module: Module) -> tuple[torch.Tensor, slice]:
        """Return the scales of the blocks of all rows and the kept columns, and the kept rows."""
        spec = self.weight_scale(module)
        scales = read_scale(reader, spec).reshape(spec.shape)
        if module.kept_columns is not None:
            kept = module.kept_columns
            scales = scales[:, kept.start // BLOCK : ceil_div(kept.stop, BLOCK)]
        return scales, module.kept_rows or slice(0, module.rows)


def _check_columns(module: Module) -> None:
    if module.kept_columns is None:
        return
    first, end = module.kept_columns.start, module.kept_columns.stop
    if first % BLOCK or (end % BLOCK and end != module.columns):
        raise UnsupportedCheckpointError(
            f"{module.name}: got columns {first} to {end} for a rank, expected multiples of "
            f"{BLOCK}, the blocks of the weight"
        )
