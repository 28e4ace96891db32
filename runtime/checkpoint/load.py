"""Builds a model from a checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..models import (
    AnyLinear,
    DecoderLayer,
    Linear,
    Llama,
    ModelConfig,
    W8A8Linear,
    compile_kernels,
)
from .config import load_config
from .errors import CheckpointError
from .finite import is_finite
from .formats import load_quantization
from .layout import (
    DENSE_DTYPES,
    Fused,
    LayerLayout,
    ModelLayout,
    Projection,
    TensorSpec,
    model_layout,
)
from .reader import CheckpointReader, require_finite
from .scales import merge_asymmetric, read_scale, read_zero_point, require_zero
from .weights import QUANTIZED_DTYPES, quantize_weight


def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_context: int | None = None,
    lm_head_dtype: torch.dtype | None = None,
    batch_invariant: bool = True,
) -> Llama:
    """Load a Hugging Face checkpoint folder: Llama, Mistral, Qwen2 or Qwen3.

    Reads plain bf16, fp16 and fp32 weights; compressed-tensors W8A8 INT8 and FP8; Hugging Face
    `fp8` and ModelOpt FP8 with a scale per tensor. q, k, v and gate, up are joined into one layer
    each: their weights keep their scales (one per output row from then on), and a static
    activation scale becomes the largest of the parts', so that nothing saturates that did not
    before. FP8 activations without a static scale are quantised per token, whatever granularity
    the file names. No tensor shares memory with the files. On CUDA quantised weights are packed
    for the kernels, one at a time, and kernels that are not compiled yet are compiled side by side.

    Args:
        path: folder with `config.json` and safetensors files.
        device: where the tensors go.
        dtype: of unquantised weights and activations: bf16, fp16 or fp32; default: the file's.
        max_context: longest sequence to serve, at most (and by default) the model's own.
        lm_head_dtype: int8 or float8_e4m3fn: quantise an output projection that the file has not
            quantised, with a scale per row. By default it stays as it is.
        batch_invariant: whether what is generated has the same bits whatever other sequences are
            served beside it, at the price of the fastest kernels for up to 16 of them.

    Raises:
        CheckpointError: naming the file and the tensor, when something is missing, damaged,
            contradictory, NaN or infinite. Headers of all files are checked before any data.
        UnsupportedCheckpointError: naming the field, for a quantisation that is not implemented.
        UnsupportedModelError: for a model that is not implemented.
        KernelBuildError: when compiling a kernel fails.
        TypeError, ValueError: for `dtype`, `max_context` or `lm_head_dtype`.
    """
    folder = Path(path)
    config = load_config(folder)
    if dtype is not None:
        if dtype not in DENSE_DTYPES:
            expected = ", ".join(str(item) for item in DENSE_DTYPES)
            raise TypeError(f"dtype: got {dtype}, expected one of {expected}")
        config = replace(config, dtype=dtype)
    if lm_head_dtype is not None and lm_head_dtype not in QUANTIZED_DTYPES:
        expected = " or ".join(map(str, QUANTIZED_DTYPES))
        raise TypeError(f"lm_head_dtype: got {lm_head_dtype}, expected {expected}")
    max_context = config.context(max_context)
    layout = model_layout(config, load_quantization(folder))
    with CheckpointReader(folder) as reader:
        reader.check(layout.tensors())
        builder = _Builder(reader, config.dtype, torch.device(device), batch_invariant)
        model = builder.model(config, layout, max_context, lm_head_dtype)
    compile_kernels(model)
    return model


class _Builder:
    def __init__(
        self,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        self._reader = reader
        self._dtype = dtype
        self._device = device
        self._batch_invariant = batch_invariant

    def model(
        self,
        config: ModelConfig,
        layout: ModelLayout,
        max_context: int,
        lm_head_dtype: torch.dtype | None,
    ) -> Llama:
        embedding = self._stack([layout.embedding], self._dtype)
        check_tied(self._reader, layout)
        lm_head = self._linear((layout.lm_head,)) if layout.lm_head else Linear(embedding)
        if lm_head_dtype is not None and isinstance(lm_head, Linear):
            lm_head = self._quantized(lm_head, lm_head_dtype)
        return Llama(
            config,
            embedding,
            [self._layer(layer) for layer in layout.layers],
            self._stack([layout.norm], self._dtype),
            lm_head,
            max_context=max_context,
            batch_invariant=self._batch_invariant,
        )

    def _layer(self, layout: LayerLayout) -> DecoderLayer:
        return DecoderLayer(
            input_norm=self._stack([layout.input_norm], self._dtype),
            qkv=self._linear(layout.qkv),
            o=self._linear(layout.o),
            post_attention_norm=self._stack([layout.post_attention_norm], self._dtype),
            gate_up=self._linear(layout.gate_up),
            down=self._linear(layout.down),
            q_norm=self._stack([layout.q_norm], self._dtype) if layout.q_norm else None,
            k_norm=self._stack([layout.k_norm], self._dtype) if layout.k_norm else None,
        )

    def _linear(self, parts: Fused) -> AnyLinear:
        scheme = parts[0].scheme
        biases = [part.bias for part in parts if part.bias is not None]
        bias = self._stack(biases, self._dtype) if biases else None
        weights = [part.weight for part in parts]
        if scheme is None:
            return Linear(self._stack(weights, self._dtype), bias)
        for part in parts:
            for spec in part.unused_zero_points:
                require_zero(self._reader, spec)
        weight = self._stack(weights, scheme.dtype)
        input_scale, zero_point = self._input_quantization(parts)
        return W8A8Linear(
            weight=weight,
            weight_scale=self._weight_scale(parts),
            out_dtype=self._dtype,
            bias=bias,
            input_scale=input_scale,
            input_zero_point=zero_point,
            weight_sum=None if zero_point is None else weight.sum(1, dtype=torch.int32),
            batch_invariant=self._batch_invariant,
        )

    def _quantized(self, linear: Linear, dtype: torch.dtype) -> W8A8Linear:
        """Return a layer with 8-bit weights and fp32 output, as logits are wanted."""
        weight, scale = quantize_weight(linear.weight, dtype, torch.float32)
        bias = None if linear.bias is None else linear.bias.float()
        return W8A8Linear(
            weight=weight,
            weight_scale=scale.squeeze(1),
            out_dtype=torch.float32,
            bias=bias,
            batch_invariant=self._batch_invariant,
        )

    def _weight_scale(self, parts: Sequence[Projection]) -> torch.Tensor:
        scales = [
            read_scale(self._reader, part.weight_scale).expand(part.rows)
            for part in parts
            if part.weight_scale
        ]
        return torch.cat(scales).to(self._device)

    def _input_quantization(
        self, parts: Sequence[Projection]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the fp32 scale and int32 zero point that serve all parts, None where absent."""
        scales = [
            read_scale(self._reader, part.input_scale, positive=True)
            for part in parts
            if part.input_scale
        ]
        zero_points = [
            read_zero_point(self._reader, part.input_zero_point)
            for part in parts
            if part.input_zero_point
        ]
        if not scales:
            return None, None
        if not zero_points:
            return torch.cat(scales).max().to(self._device), None
        scale, zero_point = merge_asymmetric(torch.cat(scales), torch.cat(zero_points))
        return scale.to(self._device), zero_point.to(self._device)

    def _stack(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensors one under another, in memory of their own."""
        rows = sum(spec.shape[0] for spec in specs)
        shape = (rows, *specs[0].shape[1:])
        stacked = torch.empty(shape, dtype=dtype, device=self._device)
        for spec, part in zip(specs, stacked.split([spec.shape[0] for spec in specs]), strict=True):
            stored = self._reader.read(spec)
            part.copy_(stored)
            if not is_finite(part):
                require_finite(self._reader, spec)
                raise CheckpointError(
                    f"{self._reader.where(spec)}: holds numbers beyond the range of {dtype}; "
                    f"load it as {stored.dtype}"
                )
        return stacked


def check_tied(reader: CheckpointReader, layout: ModelLayout) -> None:
    """Check that a stored copy of a tied embedding, if there is one, equals the embedding.

    Raises:
        CheckpointError: naming the tensor, when it differs.
    """
    spec = layout.tied_output
    if spec is None or not reader.has(spec):
        return
    if not torch.equal(reader.read(spec), reader.read(layout.embedding)):
        raise CheckpointError(
            f"{reader.where(spec)}: differs from {layout.embedding.name}, although config.json "
            "says that they are tied (tie_word_embeddings)"
        )
