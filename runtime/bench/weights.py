"""A decoder of any shape with random weights, made on the device."""

from __future__ import annotations

from dataclasses import dataclass

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
from ..ops import channel_scales
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


def random_decoder(
    config: ModelConfig,
    precision: str,
    device: torch.device,
    *,
    max_context: int,
    lm_head: str = "bf16",
    batch_invariant: bool = True,
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

    Raises:
        ValueError: for another precision, or a `max_context` that the model does not have.
    """
    for name, value, known in (
        ("precision", precision, PRECISIONS),
        ("lm_head", lm_head, HEAD_PRECISIONS),
    ):
        if value not in known:
            raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")
    family = family_of(config)
    loader = _RandomLoader(device, precision, lm_head, batch_invariant, config)
    return family.load(
        config,
        family.layout(config),
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
    config: ModelConfig

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(0)

    def tensor(self, part: TensorPart) -> torch.Tensor:
        if len(part.spec.shape) == 2:
            return self._normal(*part.spec.shape)
        dtype = part.dtype or torch.bfloat16
        return torch.ones(part.spec.shape, dtype=dtype, device=self.device)

    def linear(self, part: LinearPart) -> Linear:
        if part.chooses:
            return self._linear(part.shape, "bf16", torch.float32)
        return self._linear(part.shape, self.precision, torch.bfloat16)

    def experts(self, part: ExpertsPart) -> Experts:
        shape = (part.num_experts, *part.shape)
        weight = self._normal(shape[0] * shape[1], shape[2])
        if self.precision == "bf16":
            return DenseExperts(weight.view(shape), part.gated)
        if self.precision == _BLOCKS:
            found = [quantize_weight_blocks(own, torch.float32) for own in weight.view(shape)]
            values = torch.stack([value for value, _ in found])
            scales = [channel_scales([(scale, slice(0, shape[1]))]) for _, scale in found]
            return BlockFP8Experts(values, part.gated, torch.stack(scales), torch.bfloat16)
        values, scale = quantize_weight(weight, dtype_named(self.precision), torch.float32)
        return W8A8Experts(values.view(shape), part.gated, scale.view(shape[:2]), torch.bfloat16)

    def input_factors(self, part: LinearPart) -> None:
        """Return None: every input is multiplied as it is."""

    def head(self, part: LinearPart | None, embedding: torch.Tensor) -> Linear:
        if part is None and self.lm_head == "bf16":
            return DenseLinear(embedding, out_dtype=torch.float32)
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self._linear(shape, self.lm_head, torch.float32)

    def _normal(self, rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        return weight.normal_(std=columns**-0.5, generator=self._generator)

    def _linear(self, shape: tuple[int, int], precision: str, out: torch.dtype) -> Linear:
        weight = self._normal(*shape)
        if precision == "bf16":
            return DenseLinear(weight, out_dtype=out)
        if precision == _BLOCKS:
            values, scale = quantize_weight_blocks(weight, torch.float32)
            of_channels = channel_scales([(scale, slice(0, shape[0]))])
            return BlockFP8Linear(values, of_channels, out, batch_invariant=self.batch_invariant)
        values, scale = quantize_weight(weight, dtype_named(precision), torch.float32)
        return W8A8Linear(values, scale[:, 0], out, batch_invariant=self.batch_invariant)
