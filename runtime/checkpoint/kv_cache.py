"""Reads what a checkpoint's configuration says of an 8-bit KV cache, and its scales.

The fields and the names of tensors are common to the formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..models import KVScales
from ..models.parts import TensorSpec
from .reader import CheckpointReader
from .scales import read_scale
from .section import Section

_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}
_ALGORITHMS = {"INT8": torch.int8, "FP8": torch.float8_e4m3fn}
_SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((1,), ())
_HARMLESS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclass(frozen=True)
class KVCacheScheme:
    """Keys and values in 8 bits, with a scale each per layer."""

    dtype: torch.dtype

    def tensors(self, num_layers: int, reader: CheckpointReader) -> Iterator[TensorSpec]:
        """Yield the scales of keys and values, layer by layer.

        A file without any may be of a cache whose numbers are stored as they are.
        """
        found = any(reader.has(spec) for spec in _scales(num_layers, required=False))
        yield from _scales(num_layers, required=found)

    def read(self, num_layers: int, reader: CheckpointReader) -> KVScales:
        """Return the scales of a checked checkpoint.

        Raises:
            CheckpointError: naming the file and the tensor, for a scale that is not above 0.
        """
        specs = list(self.tensors(num_layers, reader))
        if not reader.has(specs[0]):
            return KVScales(self.dtype, None, None)
        scales = [read_scale(reader, spec, positive=True) for spec in specs]
        return KVScales(self.dtype, torch.cat(scales[::2]), torch.cat(scales[1::2]))


def kv_cache_scheme(config: Section) -> KVCacheScheme | None:
    """Return what a configuration says of the KV cache, None where it says nothing.

    Args:
        config: `quantization_config`, or ModelOpt's `quantization`.

    Raises:
        CheckpointError: when it is malformed.
        UnsupportedCheckpointError: naming the field, for anything but INT8 or FP8 (e4m3),
            symmetric, with one static scale per layer; and when two fields contradict each other.
    """
    algorithm = config.choice("kv_cache_quant_algo", None, *_ALGORITHMS)
    named = None if algorithm is None else _ALGORITHMS[algorithm]
    described = _described(config)
    if named is not None and described is not None and named != described:
        raise config.refusal("kv_cache_scheme", f"kv_cache_quant_algo is {algorithm!r}")
    dtype = named or described
    return None if dtype is None else KVCacheScheme(dtype)


def _described(config: Section) -> torch.dtype | None:
    written = config.get("kv_cache_scheme")
    if written is None:
        return None
    if not isinstance(written, dict):
        config.choice("kv_cache_scheme", "static")  # of AutoFP8
        return torch.float8_e4m3fn
    arguments = config.child("kv_cache_scheme")
    arguments.choice("num_bits", 8)
    kind = arguments.choice("type", *_DTYPES)
    arguments.choice("strategy", "tensor", default="tensor")
    arguments.choice("dynamic", False, default=False)
    arguments.choice("symmetric", True, default=True)
    arguments.reject_others(*_HARMLESS)
    return _DTYPES[kind]


def _scales(num_layers: int, *, required: bool) -> Iterator[TensorSpec]:
    for layer in range(num_layers):
        attention = f"model.layers.{layer}.self_attn"
        for part in "kv":
            names = (
                f"{attention}.{part}_scale",
                f"{attention}.{part}_proj.{part}_scale",
                f"{attention}.{part}_proj.output_scale",
                f"{attention}.kv_scale",  # of both
            )
            yield TensorSpec(names, _SCALAR_SHAPES, required=required)
