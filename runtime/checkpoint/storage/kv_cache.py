"""Reads what a checkpoint's configuration says of an 8-bit KV cache, and its scales.

The fields and the names of tensors are common to the formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...models import KVScales, ModelConfig
from ...models.modules import TensorSpec
from ..reader import CheckpointReader
from ..scales import read_scale
from ..section import Section

_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}
_ALGORITHMS = {"INT8": torch.int8, "FP8": torch.float8_e4m3fn}
_TENSOR, _PER_HEAD = "tensor", "attn_head"  # strategies
_HARMLESS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclass(frozen=True)
class KVCacheScheme:
    """Keys and values in 8 bits, with a scale each per layer, or per layer and KV head."""

    dtype: torch.dtype
    per_head: bool = False

    def tensors(self, config: ModelConfig, reader: CheckpointReader) -> Iterator[TensorSpec]:
        """Yield the scales of keys and values, layer by layer.

        A file without any may be of a cache whose numbers are stored as they are.
        """
        heads = config.num_kv_heads
        shapes: tuple[tuple[int, ...], ...] = ((1,), ())
        if self.per_head:
            shapes = ((heads, 1, 1), (heads,))
        found = any(reader.has(spec) for spec in _scales(config.num_layers, shapes, required=False))
        yield from _scales(config.num_layers, shapes, required=found)

    def read(self, config: ModelConfig, reader: CheckpointReader) -> KVScales:
        """Return the scales of a checked checkpoint.

        Raises:
            CheckpointError: naming the file and the tensor, for a scale that is not above 0.
        """
        specs = list(self.tensors(config, reader))
        if not reader.has(specs[0]):
            return KVScales(self.dtype, None, None)
        scales = [read_scale(reader, spec, positive=True) for spec in specs]
        join = torch.stack if self.per_head else torch.cat
        return KVScales(self.dtype, join(scales[::2]), join(scales[1::2]))


def kv_cache_scheme(config: Section) -> KVCacheScheme | None:
    """Return what a configuration says of the KV cache, None where it says nothing.

    Args:
        config: `quantization_config`, or ModelOpt's `quantization`.

    Raises:
        CheckpointError: when it is malformed.
        UnsupportedCheckpointError: naming the field, for anything but INT8 or FP8 (e4m3),
            symmetric, with static scales, one per layer or KV head; and when two fields contradict
            each other.
    """
    algorithm = config.choice("kv_cache_quant_algo", None, *_ALGORITHMS)
    named = None if algorithm is None else _ALGORITHMS[algorithm]
    described = _described(config)
    if described is None:
        return None if named is None else KVCacheScheme(named)
    if named is not None and named != described.dtype:
        raise config.refusal("kv_cache_scheme", f"kv_cache_quant_algo is {algorithm!r}")
    return described


def describe_kv_cache(dtype: torch.dtype) -> dict[str, object]:
    """Return the `kv_cache_scheme` of static scales per layer, as compressed-tensors writes it."""
    kind = next(name for name, known in _DTYPES.items() if known is dtype)
    return {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": _TENSOR,
        "dynamic": False,
        "observer": "minmax",
    }


def scale_names(layer: int) -> tuple[str, str]:
    """Return what compressed-tensors calls the scales of a layer's keys and values."""
    attention = f"model.layers.{layer}.self_attn"
    return f"{attention}.k_scale", f"{attention}.v_scale"


def _described(config: Section) -> KVCacheScheme | None:
    written = config.get("kv_cache_scheme")
    if written is None:
        return None
    if not isinstance(written, dict):
        config.choice("kv_cache_scheme", "static")  # of AutoFP8
        return KVCacheScheme(torch.float8_e4m3fn)
    arguments = config.child("kv_cache_scheme")
    arguments.choice("num_bits", 8)
    kind = arguments.choice("type", *_DTYPES)
    strategy = arguments.choice("strategy", _TENSOR, _PER_HEAD, default=_TENSOR)
    arguments.choice("dynamic", False, default=False)
    arguments.choice("symmetric", True, default=True)
    arguments.reject_others(*_HARMLESS)
    return KVCacheScheme(_DTYPES[kind], per_head=strategy == _PER_HEAD)


def _scales(
    num_layers: int, shapes: tuple[tuple[int, ...], ...], *, required: bool
) -> Iterator[TensorSpec]:
    for layer in range(num_layers):
        attention = f"model.layers.{layer}.self_attn"
        for part, name in zip("kv", scale_names(layer), strict=True):
            names = (
                name,
                f"{attention}.{part}_proj.{part}_scale",
                f"{attention}.{part}_proj.output_scale",
                f"{attention}.kv_scale",  # of both
            )
            yield TensorSpec(names, shapes, required=required)
