"""Finds static scales of an 8-bit KV cache, by the keys and values that a text has in a model."""

from __future__ import annotations

import torch

from ...models import KVScales
from ...models.layout import DecoderLayout
from .smooth import Smoothing, value_rows

# What the largest magnitude is divided by, as in compressed-tensors: half of the grid's range.
_GRID_MAX = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}


def calibrate_kv_cache(
    largest: torch.Tensor, dtype: torch.dtype, layout: DecoderLayout, factors: Smoothing
) -> KVScales:
    """Return scales by which no key and no value of a text saturates.

    Args:
        largest: magnitudes of keys and values, as `Observed` holds them.
        dtype: of the cache, int8 or float8_e4m3fn.
        layout: of the model.
        factors: by which its weights are changed. Those of rows of v change values; keys stay what
            they are, since norms in front of q, k and v take up the factors of their columns.

    Returns:
        scales [num_layers] of keys and of values.

    Raises:
        ValueError: naming the layer, when keys or values are NaN or infinite.
    """
    written = largest.clone()
    for layer, parts in enumerate(layout.layers):
        rows = value_rows(factors, parts)
        if rows is not None:
            values = written[layer, 1]
            values *= rows[len(rows) - values.numel() :].view_as(values)
    of_layers = written.amax(dim=(2, 3))
    for layer, pair in enumerate(of_layers.tolist()):
        for name, value in zip(("keys", "values"), pair, strict=True):
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"calibrate: {name} of layer {layer} are NaN or infinite, expected numbers"
                )
    scales = of_layers / _GRID_MAX[dtype]
    scales = scales.where(scales > torch.finfo(torch.float32).tiny, 1.0)  # of nothing but zeros
    return KVScales(dtype, scales[:, 0], scales[:, 1])
