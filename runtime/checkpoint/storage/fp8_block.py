"""FP8 weights with a scale per block of 128 by 128, and FP8 activations in groups of 128."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ... import ops
from ...jit.variant import Variant
from ...models.block_linear import BlockFP8Linear
from ...models.kinds import InputKind
from ...models.parts import Module, TensorSpec
from ...ops.common.sizes import ceil_div
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
        shape = (module.rows, module.columns)
        return TensorSpec((f"{module.name}.weight",), (shape,), (self.dtype,))

    def weight_scale(self, module: Module) -> TensorSpec:
        """Return the scale of each block."""
        rows, columns = ceil_div(module.rows, BLOCK), ceil_div(module.columns, BLOCK)
        # The first spelling is that of DeepSeek and transformers; both are factors, not divisors.
        names = (f"{module.name}.weight_scale_inv", f"{module.name}.weight_scale")
        # The second shape is that of ModelOpt.
        return TensorSpec(names, ((rows, columns), (rows, 1, columns, 1)))

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

    def build(
        self, reader: CheckpointReader, modules: Sequence[Module], target: Target
    ) -> BlockFP8Linear:
        """Return the layer: the rows of each module keep the blocks that they have in the file.

        Raises:
            UnsupportedCheckpointError: naming the module, where a rank's part of it, or a module
                that others follow, would divide blocks more finely than kernels can.
        """
        bias = biases(reader, modules, target)
        weights = [weight_of(module, self.weight(module)) for module in modules]
        weight = stack(reader, weights, self.dtype, target.device)
        blocks = [self._blocks(reader, module) for module in modules]
        try:
            scale = ops.channel_scales(blocks)
        except ValueError as error:
            names = ", ".join(module.name for module in modules)
            raise UnsupportedCheckpointError(f"{names}: {error}") from error
        return BlockFP8Linear(
            weight=weight,
            weight_scale=scale.to(target.device),
            out_dtype=target.results,
            bias=bias,
            power_of_two=self.power_of_two,
            batch_invariant=target.batch_invariant,
        )

    def _blocks(self, reader: CheckpointReader, module: Module) -> tuple[torch.Tensor, slice]:
        """Return the scales of the blocks of all rows and the kept columns, and the kept rows."""
        spec = self.weight_scale(module)
        scales = read_scale(reader, spec).reshape(spec.shape)
        if module.kept_columns is not None:
            first, end = module.kept_columns.start, module.kept_columns.stop
            if first % BLOCK or (end % BLOCK and end != module.columns):
                raise UnsupportedCheckpointError(
                    f"{module.name}: got columns {first} to {end} for a rank, expected multiples "
                    f"of {BLOCK}, the blocks of the weight"
                )
            scales = scales[:, first // BLOCK : ceil_div(end, BLOCK)]
        return scales, module.kept_rows or slice(0, module.rows)
