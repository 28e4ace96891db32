"""8-bit weights with a scale per output row or tensor, and 8-bit activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...jit.variant import Variant
from ...models.asymmetric_linear import AsymmetricLinear
from ...models.experts.products import W8A8Experts, experts_kernels
from ...models.kinds import InputKind
from ...models.layers import W8A8Linear
from ...models.modules import Module, TensorSpec
from ...models.parts import ExpertsPart
from ...ops.linear.precompile import layer_kernels
from ..errors import UnsupportedCheckpointError
from ..reader import CheckpointReader
from ..scales import merge_asymmetric, read_scale, read_zero_point, require_zero
from .base import StoredScheme, Target, biases, stack, weight_of

_ZERO_POINT_DTYPES = (torch.int8, torch.int32)
# Scalars are stored as [] or [1] by one writer or another, channel scales as [N, 1] or [N].
_SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((1,), ())


@dataclass(frozen=True)
class W8A8Scheme(StoredScheme):
    """W8A8 storage of one linear module.

    `dtype` of the weight is int8 or float8_e4m3fn; its scale is per output row (`per_channel`)
    or one for the tensor. Activations are quantised per token at run time, or with the file's
    `static_input` scale, and with zero points of the same unless `symmetric_input`.
    """

    dtype: torch.dtype
    per_channel: bool
    static_input: bool
    symmetric_input: bool = True

    def __str__(self) -> str:
        """Return what messages say of it."""
        kind = "INT8" if self.dtype is torch.int8 else "FP8"
        weights = "row" if self.per_channel else "tensor"
        inputs = "fixed scales" if self.static_input else "a scale per token"
        zero_points = "" if self.symmetric_input else " and zero points"
        return f"{kind} with a scale per {weights}, activations with {inputs}{zero_points}"

    def weight(self, module: Module) -> TensorSpec:
        """Return the weight [rows, columns]."""
        return module.tensor("weight", (module.rows, module.columns), dtypes=(self.dtype,))

    def weight_scale(self, module: Module) -> TensorSpec:
        """Return the scale of each row, or of the tensor."""
        per_channel = ((module.rows, 1), (module.rows,))
        # The second spelling is that of transformers' own FP8; both are factors, not divisors.
        names = ("weight_scale", "weight_scale_inv")
        return module.tensor(names, *(per_channel if self.per_channel else _SCALAR_SHAPES))

    def input_scale(self, module: Module) -> TensorSpec | None:
        """Return the scale of activations, None where they are quantised per token."""
        if not self.static_input:
            return None
        return module.tensor(("input_scale", "activation_scale"), *_SCALAR_SHAPES)

    def input_zero_point(self, module: Module) -> TensorSpec | None:
        """Return the zero point of activations, None where the file has none."""
        if self.symmetric_input or not self.static_input:
            return None
        return _zero_point(module, "input_zero_point", _SCALAR_SHAPES, required=True)

    def unused_zero_points(self, module: Module) -> Iterator[TensorSpec]:
        """Yield zero points of symmetric quantisation, which some writers store: all of them 0."""
        if self.dtype is not torch.int8:
            return
        shapes = (*_SCALAR_SHAPES, (module.rows, 1), (module.rows,))
        yield _zero_point(module, "weight_zero_point", shapes, required=False)
        if self.static_input and self.symmetric_input:
            yield _zero_point(module, "input_zero_point", _SCALAR_SHAPES, required=False)

    def tensors(self, module: Module) -> Iterator[TensorSpec]:
        """Yield every tensor of the module; the weight is the first."""
        single = (
            self.weight(module),
            self.weight_scale(module),
            self.input_scale(module),
            self.input_zero_point(module),
            module.bias,
        )
        yield from (spec for spec in single if spec is not None)
        yield from self.unused_zero_points(module)

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
        return layer_kernels(
            kind,
            shape,
            self.dtype,
            dtype,
            out_dtype=out_dtype,
            batch_invariant=batch_invariant,
            asymmetric=self._has_zero_points,
            device=device,
        )

    def build(
        self, reader: CheckpointReader, modules: Sequence[Module], target: Target
    ) -> W8A8Linear:
        """Return the layer: each row keeps its scale; inputs get one scale that serves all."""
        weight, weight_scale = self._weight(reader, modules, target.device)
        bias = biases(reader, modules, target)
        input_scale, zero_point = self._input_quantization(reader, modules, target.device)
        layer = AsymmetricLinear if self._has_zero_points else W8A8Linear
        return layer(
            weight=weight,
            weight_scale=weight_scale,
            out_dtype=target.results,
            bias=bias,
            input_scale=input_scale,
            input_zero_point=zero_point,
            weight_sum=None if zero_point is None else weight.sum(1, dtype=torch.int32),
            batch_invariant=target.batch_invariant,
        )

    def build_experts(
        self, reader: CheckpointReader, part: ExpertsPart, target: Target
    ) -> W8A8Experts:
        """Return the grouped products: each row keeps its scale; inputs get one that serves all."""
        if not self.symmetric_input:
            raise UnsupportedCheckpointError(
                f"{part.together}: got activations with zero points, expected symmetric ones of "
                "experts"
            )
        modules = tuple(part.stored())
        weight, weight_scale = self._weight(reader, modules, target.device)
        input_scale, _ = self._input_quantization(reader, modules, target.device)
        return W8A8Experts(
            weight=weight.view(part.num_experts, *part.shape),
            gated=part.gated,
            weight_scale=weight_scale.view(part.num_experts, -1),
            out_dtype=target.results,
            input_scale=input_scale,
        )

    def experts_kernels(self, dtype: torch.dtype, *, out_dtype: torch.dtype) -> list[Variant]:
        """Return what the products launch."""
        return experts_kernels(self.dtype, dtype, out_dtype)

    def _weight(
        self, reader: CheckpointReader, modules: Sequence[Module], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of all modules, and the scale of each row."""
        for module in modules:
            for spec in self.unused_zero_points(module):
                require_zero(reader, spec)
        weights = [weight_of(module, self.weight(module)) for module in modules]
        weight = stack(reader, weights, self.dtype, device)
        scales = [self._row_scales(reader, module) for module in modules]
        return weight, torch.cat(scales).to(device)

    @property
    def _has_zero_points(self) -> bool:
        """Whether tokens get zero points at run time."""
        return not (self.symmetric_input or self.static_input)

    def _row_scales(self, reader: CheckpointReader, module: Module) -> torch.Tensor:
        scales = read_scale(reader, self.weight_scale(module)).expand(module.rows)
        return scales if module.kept_rows is None else scales[module.kept_rows]

    def _input_quantization(
        self, reader: CheckpointReader, modules: Sequence[Module], device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the fp32 scale and int32 zero point that serve all modules, None where absent."""
        scales = [
            read_scale(reader, spec, positive=True)
            for module in modules
            if (spec := self.input_scale(module)) is not None
        ]
        zero_points = [
            read_zero_point(reader, spec)
            for module in modules
            if (spec := self.input_zero_point(module)) is not None
        ]
        if not scales:
            return None, None
        if not zero_points:
            return torch.cat(scales).max().to(device), None
        scale, zero_point = merge_asymmetric(torch.cat(scales), torch.cat(zero_points))
        return scale.to(device), zero_point.to(device)


def _zero_point(
    module: Module, suffix: str, shapes: tuple[tuple[int, ...], ...], *, required: bool
) -> TensorSpec:
    return module.tensor(suffix, *shapes, dtypes=_ZERO_POINT_DTYPES, required=required)
