"""SmoothQuant: moves the range of a layer's input columns to its weight's, and in front of it.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", 2023, with α = 1/2. Factors are powers of two, so that the model stays what it is, to the
bit, until its weights are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ...models.layout import DecoderLayout
from ...models.modules import Module
from ...models.parts import LinearPart, NormPart


@dataclass
class Smoothing:
    """Factors of rows and columns of stored tensors, by name; what is not named stays."""

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a checkpoint with its factors, in its dtype.

        Raises:
            ValueError: when that does not hold the products.
        """
        rows, columns = self.rows.get(name), self.columns.get(name)
        if rows is None and columns is None:
            return tensor
        scaled = tensor.float()
        if rows is not None:
            scaled = scaled * (rows if tensor.dim() == 1 else rows.unsqueeze(1))
        if columns is not None:
            scaled = scaled * columns
        result = scaled.to(tensor.dtype)
        if tensor.isfinite().all() and not result.isfinite().all():
            raise ValueError(f"holds numbers beyond {tensor.dtype} when calibration scales them")
        return result


def smoothing(
    layout: DecoderLayout,
    largest: Mapping[str, torch.Tensor],
    read: Callable[[Module], torch.Tensor],
    is_quantized: Callable[[Module], bool],
) -> Smoothing:
    """Return the factors of a model.

    A layer is smoothed where something in front of it can take up the inverse factors
    (`LinearPart.after`) and all modules that share its input are quantised.

    Args:
        layout: of the model.
        largest: magnitudes of inputs, as `Observed` holds them.
        read: returns the stored weight of a module.
        is_quantized: whether a module gets 8-bit weights.
    """
    found = Smoothing()
    for parts in layout.layers:
        given: dict[str | None, Any] = {
            item.name: getattr(parts, item.name) for item in fields(parts)
        }
        linears = [part for part in given.values() if isinstance(part, LinearPart)]
        # Rows in front first: they change the weights that the factors of a norm's layer see.
        for part in sorted(linears, key=lambda part: isinstance(given.get(part.after), NormPart)):
            alone = sum(other.after == part.after for other in linears) == 1
            if part.after is not None and alone and all(map(is_quantized, part.modules)):
                _smooth(found, part, given[part.after], largest[part.modules[0].name], read)
    return found


def value_rows(found: Smoothing, parts: Any) -> torch.Tensor | None:
    """Return the factors of the rows of a layer's v, the last of those returned.

    Args:
        found: the factors of a model.
        parts: of the layer.
    """
    for part in (getattr(parts, item.name) for item in fields(parts)):
        if isinstance(part, LinearPart) and part.kind == "per_token" and part.after is not None:
            source = getattr(parts, part.after)
            if isinstance(source, LinearPart):
                return found.rows.get(f"{source.modules[-1].name}.weight")
    return None


def _smooth(
    found: Smoothing,
    part: LinearPart,
    source: Any,
    inputs: torch.Tensor,
    read: Callable[[Module], torch.Tensor],
) -> None:
    names = [f"{module.name}.weight" for module in part.modules]
    columns = [
        found.apply(name, read(module).float()).abs().amax(0)
        for name, module in zip(names, part.modules, strict=True)
    ]
    weights = torch.stack(columns).amax(0)
    if isinstance(source, NormPart):
        if source.config.plus_one:
            return  # 16 bits hold the weight less 1 coarsely, once the sum is scaled
        factors = _factors(inputs, weights)
        found.rows[source.weight.name] = 1 / factors
        if source.bias is not None:
            found.rows[source.bias.name] = 1 / factors
    elif isinstance(source, LinearPart) and part.kind.endswith("_mul"):
        factors = _factors(inputs, weights)
        _divide_last_rows(found, source.modules[-1], factors)
    elif isinstance(source, LinearPart) and part.kind == "per_token":
        # Query heads of one KV head read the same rows of v.
        dim = part.modules[0].columns // part.modules[0].column_units
        kv_size = (source.shape[0] - part.shape[1]) // 2
        heads = [values.view(kv_size // dim, -1, dim) for values in (inputs, weights)]
        of_v = _factors(*(values.amax(1).flatten() for values in heads))
        _divide_last_rows(found, source.modules[-1], of_v)
        factors = of_v.view(-1, 1, dim).expand_as(heads[0]).flatten()
    else:
        return
    found.columns.update(dict.fromkeys(names, factors))


def _factors(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return what columns of a weight are multiplied by, and its inputs divided."""
    used = (inputs > 0) & (weights > 0)
    exponents = torch.where(used, inputs.log2() - weights.log2(), torch.zeros(())) / 2
    middle = exponents[used].mean() if used.any() else 0.0
    return torch.where(used, exponents - middle, torch.zeros(())).round().exp2()


def _divide_last_rows(found: Smoothing, module: Module, factors: torch.Tensor) -> None:
    inverse = torch.ones(module.rows)
    inverse[module.rows - len(factors) :] = 1 / factors
    found.rows[f"{module.name}.weight"] = inverse
    if module.bias is not None:
        found.rows[module.bias.name] = inverse
