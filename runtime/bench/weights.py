"""A decoder of any shape with random weights, made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.weights import quantize_weight, quantize_weight_blocks
from ..models import (
    BlockFP8Linear,
    Decoder,
    DenseLinear,
    Linear,
    ModelConfig,
    W8A8Linear,
    family_of,
)
from ..models.experts.products import BlockFP8Experts, DenseExperts, Experts, W8A8Experts
from ..models.parts import ExpertsPart, LinearPart, TensorPart
from ..models.ranks import ranks_of
from ..ops import channel_scales
from ..ops.collective.communicator import Communicator
from .shapes import HEAD_PRECISIONS, PRECISIONS

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_DTYPES |= {"fp16": torch.float16, "fp32": torch.float32}
_BLOCKS = "fp8-block"
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def precision(model: Decoder) -> str:
    """Return how the linear layers compute: one of `PRECISIONS`, "fp16" or "fp32"."""
    linear = next(model.linears()).linear
    return _BLOCKS if isinstance(linear, BlockFP8Linear) else dtype_name(linear.weight_dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "int8", "fp8", "bf16", "fp16" or "fp32"."""
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that `dtype_name` calls so."""
    return _DTYPES[name]


def expert_scales(blocks: torch.Tensor, rows: int, *, gated: bool) -> torch.Tensor:
    """Return the scales of an expert's channels, [gate | up] if gated, of those of its blocks."""
    parts = [slice(0, rows // 2), slice(rows // 2, rows)] if gated else [slice(0, rows)]
    return channel_scales([(blocks, part) for part in parts])


def random_decoder(
    config: ModelConfig,
    precision: str,
    device: torch.device,
    *,
    max_context: int,
    lm_head: str = "bf16",
    batch_invariant: bool = True,
    communicator: Communicator | None = None,
) -> Decoder:
    """Return a decoder with random weights that keep activations of order one.

    8-bit ones are normal numbers quantised as a checkpoint's are; norms are ones. Its kernels are
    not compiled: `compile_kernels` does that.

    Args:
        config: shape of the model; only bf16 models are made, without biases.
        precision: of the linear layers but the output projection: one of `PRECISIONS`.
        device: where the weights are made.
        max_context: longest sequence served.
        lm_head: precision of the output projection: one of `HEAD_PRECISIONS`.
        batch_invariant: as of `load_model`.
        communicator: likewise. What ranks divide each of them draws by itself; what all of them
            keep, such as routers, is equal on all.

    Raises:
        UnsupportedModelError: naming a module that so many ranks cannot divide.
        TypeError, ValueError: for another precision, a `max_context` that the model does not have,
            or a communicator that is none or of another device.
    """
    for name, value, known in (
        ("precision", precision, PRECISIONS),
        ("lm_head", lm_head, HEAD_PRECISIONS),
    ):
        if value not in known:
            raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")
    family = family_of(config)
    layout = family.layout(config)
    communicator = ranks_of(communicator, device)
    if communicator is not None:
        layout = layout.shard(communicator.rank, communicator.size)
        config = config.of_rank(communicator.size)
    loader = _RandomLoader(device, precision, lm_head, batch_invariant, communicator)
    return family.load(
        config,
        layout,
        loader,
        max_context=max_context,
        batch_invariant=batch_invariant,
    )


@dataclass
class _RandomLoader:
    """Draws the weights of parts; see `ostinato.models.parts.Loader`."""

    device: torch.device
    precision: str
    lm_head: str
    batch_invariant: bool
    communicator: Communicator | None

    def __post_init__(self) -> None:
        # Of what all ranks keep, and of what is this rank's alone.
        self._common = self._own = torch.Generator(self.device).manual_seed(0)
        if self.communicator is not None:
            self._own = torch.Generator(self.device).manual_seed(1 + self.communicator.rank)

    def tensor(self, part: TensorPart) -> torch.Tensor:
        if len(part.shape) == 2:
            generator = self._common if part.kept_rows is None else self._own
            return self._normal(*part.shape, generator=generator)
        dtype = part.dtype or torch.bfloat16
        return torch.ones(part.shape, dtype=dtype, device=self.device)

    def linear(self, part: LinearPart) -> Linear:
        if part.chooses:
            return self._linear(part.shape, "bf16", torch.float32, generator=self._common)
        fan_in = part.modules[0].columns
        return self._linear(part.shape, self.precision, torch.bfloat16, fan_in=fan_in)

    def experts(self, part: ExpertsPart) -> Experts:
        shape = (part.num_experts, *part.shape)
        fan_in = part.modules[0][0].columns
        weight = self._normal(shape[0] * shape[1], shape[2], fan_in=fan_in)
        if self.precision == "bf16":
            return DenseExperts(weight.view(shape), part.gated)
        if self.precision == _BLOCKS:
            found = [quantize_weight_blocks(own, torch.float32) for own in weight.view(shape)]
            values = torch.stack([value for value, _ in found])
            scales = [expert_scales(scale, shape[1], gated=part.gated) for _, scale in found]
            return BlockFP8Experts(values, part.gated, torch.stack(scales), torch.bfloat16)
        values, scale = quantize_weight(weight, dtype_named(self.precision), torch.float32)
        return W8A8Experts(values.view(shape), part.gated, scale.view(shape[:2]), torch.bfloat16)

    def input_factors(self, part: LinearPart) -> None:
        """Return None: every input is multiplied as it is."""

    def head(self, part: LinearPart | None, embedding: torch.Tensor) -> Linear:
        if part is None and self.lm_head == "bf16":
            return DenseLinear(embedding, out_dtype=torch.float32)
        rows, columns = embedding.shape if part is None else part.shape
        return self._linear((rows, columns), self.lm_head, torch.float32)

    def _normal(
        self,
        rows: int,
        columns: int,
        *,
        fan_in: int | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return a weight for inputs of `fan_in` elements, of which a rank may have some."""
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        std = (columns if fan_in is None else fan_in) ** -0.5
        return weight.normal_(std=std, generator=generator or self._own)

    def _linear(
        self,
        shape: tuple[int, int],
        precision: str,
        out: torch.dtype,
        **drawn: Any,
    ) -> Linear:
        """Return a layer; `drawn` are options of `_normal`."""
        weight = self._normal(*shape, **drawn)
        if precision == "bf16":
            return DenseLinear(weight, out_dtype=out)
        if precision == _BLOCKS:
            values, scale = quantize_weight_blocks(weight, torch.float32)
            of_channels = channel_scales([(scale, slice(0, shape[0]))])
            return BlockFP8Linear(values, of_channels, out, batch_invariant=self.batch_invariant)
        values, scale = quantize_weight(weight, dtype_named(precision), torch.float32)
        return W8A8Linear(values, scale[:, 0], out, batch_invariant=self.batch_invariant)
