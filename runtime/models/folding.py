"""Builds the parts of a layer, and folds factors of inputs into what computes these inputs.

SmoothQuant divides the columns of a weight by factors and multiplies its input by them. A norm's
weight and bias take up such factors, and so do rows of a layer in front: those of up, since the
gate is multiplied with them or ReLU lets factors through, and those of v, since attention adds rows
of them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from ..ops.linear.quantize_cuda import GATED
from .config_fields import UnsupportedModelError
from .layers import Linear
from .norms import Norm
from .parts import InputFactors, LinearPart, Loader


def build(parts: Any, loader: Loader) -> dict[str, Any]:
    """Return what the parts of a layer are loaded to, by the names of its fields.

    Raises:
        UnsupportedModelError: naming the tensor, for factors of inputs that nothing can take up.
    """
    given = {field.name: getattr(parts, field.name) for field in fields(parts)}
    built = {name: None if part is None else part.build(loader) for name, part in given.items()}
    readers: dict[str | None, list[LinearPart]] = {}
    for part in given.values():
        if isinstance(part, LinearPart):
            readers.setdefault(part.after, []).append(part)
    for after, linears in readers.items():
        found = [loader.input_factors(part) for part in linears]
        factors = next((item for item in found if item is not None), None)
        if factors is None:
            continue
        if after is None:
            raise _refusal(factors, "nothing in front of the layer can take them up")
        if not all(item is not None and item.values.equal(factors.values) for item in found):
            raise _refusal(factors, f"other layers read {after} without them")
        built[after] = _folded(built[after], linears[0], factors)
    return built


def _folded(source: Any, part: LinearPart, factors: InputFactors) -> Any:
    """Return the norm or the layer `source` with results times factors."""
    if isinstance(source, Norm):
        return _folded_norm(source, factors)
    linear: Linear = source
    rows = linear.shape[0]
    if part.kind == "per_token":
        values = _of_kv_heads(factors, part, rows)
    elif part.kind in (*GATED, "relu"):
        values = factors.values
    elif part.kind == "relu2":
        values = factors.values.sqrt()
    else:
        raise _refusal(factors, f"{part.kind} does not let them through to the layer in front")
    every = torch.cat([torch.ones(rows - len(values)), values])
    folded_layer = linear.with_factors(every)
    if folded_layer is None:
        raise _refusal(factors, "the layer in front has no scale for each row to take them up")
    return folded_layer


def _folded_norm(norm: Norm, factors: InputFactors) -> Norm:
    """Return the norm with results times factors, in the dtype of its weight."""

    def times(name: str, x: torch.Tensor) -> torch.Tensor:
        folded = (x.float() * factors.values.to(x.device)).to(x.dtype)
        if not folded.isfinite().all():
            raise _refusal(factors, f"a norm's {name} times them is beyond {x.dtype}")
        return folded

    bias = None if norm.bias is None else times("bias", norm.bias)
    return replace(norm, weight=times("weight", norm.weight), bias=bias)


def _of_kv_heads(factors: InputFactors, part: LinearPart, rows: int) -> torch.Tensor:
    """Return the factors of v's rows, the last of [q; k; v], of those of attention's results."""
    size, dim = len(factors.values), part.modules[0].columns // part.modules[0].column_units
    kv_size = (rows - size) // 2
    by_head = factors.values.view(kv_size // dim, -1, dim)
    if not by_head.eq(by_head[:, :1]).all():
        raise _refusal(factors, "query heads of one KV head have different ones")
    return by_head[:, 0].reshape(-1)


def _refusal(factors: InputFactors, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{factors.where}: holds factors of the layer's input that cannot be folded: {reason}; "
        "export without SmoothQuant"
    )
