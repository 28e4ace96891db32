"""Linear modules of a quantised checkpoint on our 8-bit kernels, instead of 16-bit products."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...checkpoint.errors import CheckpointError
from ...checkpoint.folder import checkpoint_folder
from ...checkpoint.quantization import load_quantization
from ...checkpoint.reader import CheckpointReader
from ...checkpoint.scales import read_scale
from ...checkpoint.section import CONFIG_FILE
from ...checkpoint.storage.base import StoredScheme, Target
from ...checkpoint.storage.dense import DENSE
from ...jit.variant import Variant
from ...models.modules import DENSE_DTYPES, Module
from ...ops.linear.precompile import precompile
from .linear_module import QuantizedLinear
from .replace import remove_wrappers

# torch's class, and those that transformers puts in its place, with the package that each is of.
_CLASSES = {
    "Linear": "torch",
    "FP8Linear": "transformers",
    "FbgemmFp8Linear": "transformers",
    "CompressedTensorsFP8Linear": "transformers",
}
# What wraps a module's forward and does no more than what a `QuantizedLinear` does.
_WRAPPERS = ("compressed_tensors", "transformers")
_BLOCK = 128  # columns that share a scale, in whatever format
_ROWS = 1024  # are compared at a time, which bounds the fp32 copies


@dataclass
class Linears:
    """What became of the linear modules that a checkpoint stores in 8 bits.

    Attributes:
        replaced: names of modules.
        left: names of modules to why they were left as they are.
    """

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def replace_linears(
    model: torch.nn.Module, checkpoint: str | os.PathLike[str] | None = None
) -> list[str]:
    """Put our 8-bit products in the place of a model's linear modules, and return which.

    transformers multiplies in 16 bits what a checkpoint stores in 8: compressed-tensors
    decompresses a model at its first forward, FP8 is dequantised where kernels for it are not at
    hand, and ModelOpt's formats are not known to it. Here each linear module that the checkpoint
    quantises becomes a `QuantizedLinear`: 8-bit weights as they are in the file, and activations
    quantised as the format says. It serves all formats of `ostinato.checkpoint`: those of
    compressed-tensors (INT8 and FP8 per channel or tensor, static, per token or with zero points;
    FP8 in blocks), of transformers' "fp8" and "fbgemm_fp8", and of ModelOpt, SmoothQuant's factors
    included.

    Weights are read from the checkpoint's files, before or after the first forward. A module's own
    weight has to be what the file says, in codes or dequantised, or the module is left as it is: so
    one with a merged adapter. Left are also modules with hooks, without a weight on a device, of
    another class, and those that the checkpoint has in 16 bits. `accelerate` says which and why.
    If nothing else of the model is quantised or offloaded, compressed-tensors' wrappers around its
    modules are taken off, in which no forward can be compiled.

    Products of a replaced module carry no gradient, the model can no longer be moved to another
    device or dtype, and has no state dict: save it before.

    Args:
        model: of transformers, on its device and in its dtype: bf16, fp16 or fp32.
        checkpoint: the folder or name that it was loaded from; None is `model.name_or_path`.

    Returns:
        The names of the modules that this call replaced, in the order of `named_modules`.

    Raises:
        CheckpointError: when there is no such checkpoint, or it is damaged.
        UnsupportedCheckpointError: naming the field, for another quantisation.
        KernelBuildError: when compiling a kernel fails.
        TypeError: when `model` is no module, or of another dtype.
        ValueError: when the model is quantised and nothing says what it was loaded from.
    """
    return quantize_linears(model, checkpoint).replaced


def quantize_linears(
    model: torch.nn.Module, checkpoint: str | os.PathLike[str] | None = None
) -> Linears:
    """Do what `replace_linears` does, and say what was left and why."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    folder = _folder(model, checkpoint)
    result = Linears()
    if folder is None:
        return result
    scheme_of = load_quantization(folder).scheme_of
    found = [
        (name, module, scheme)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Linear")
        and not isinstance(module, QuantizedLinear)
        and (scheme := scheme_of(name)) != DENSE
    ]
    if not found:
        return result
    dtype = getattr(model, "dtype", None)
    if dtype not in DENSE_DTYPES:
        expected = ", ".join(str(item) for item in DENSE_DTYPES)
        raise TypeError(f"model: got dtype {dtype}, expected one of {expected}")
    with CheckpointReader(folder) as reader:
        for name, module, scheme in found:
            ours = _product(name, module, scheme, reader, dtype)
            if isinstance(ours, str):
                result.left[name] = ours
                continue
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ours)
            result.replaced.append(name)
    remove_wrappers(model)
    _compile_kernels(model, result.replaced, dtype)
    return result


def _compile_kernels(model: torch.nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Compile side by side what replaced modules on CUDA launch, not one by one at first use."""
    variants: dict[torch.device, list[Variant]] = {}
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, QuantizedLinear)
        device = module.get_buffer("tensor_0").device
        if device.type == "cuda":
            found = module.layer.kernels("per_token", dtype)
            variants.setdefault(device, []).extend(found)
    for device, needed in variants.items():
        precompile(needed, device)


def _folder(model: Any, checkpoint: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of the checkpoint, None for a model that is of none."""
    if checkpoint is not None:
        return checkpoint_folder("checkpoint", checkpoint, CONFIG_FILE, weights=True)
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    name = getattr(model, "name_or_path", "")
    if not name and quantized:
        raise ValueError(
            "checkpoint: got None for a quantised model without a name_or_path, expected the "
            "folder that it was loaded from"
        )
    # A model made of a configuration may have the name of what that was read from, and one of a
    # folder's folder that folder's. Only ModelOpt's quantisation is in a checkpoint alone.
    if not name or not (quantized or os.path.isdir(name)):
        return None
    try:
        return checkpoint_folder("model.name_or_path", name, CONFIG_FILE, weights=True)
    except CheckpointError:
        if quantized:
            raise
        return None


def _product(
    name: str,
    module: torch.nn.Module,
    scheme: StoredScheme,
    reader: CheckpointReader,
    dtype: torch.dtype,
) -> QuantizedLinear | str:
    """Return what takes the place of a linear module, or why it is left as it is.

    Args:
        name: of the module, in the model and the checkpoint.
        module: on its device.
        scheme: how the checkpoint stores it.
        reader: of the checkpoint.
        dtype: of the model.
    """
    weight = getattr(module, "weight", None)
    if (reason := _reason_to_leave(module, weight)) is not None:
        return reason
    assert isinstance(weight, torch.Tensor)
    rows, columns = weight.shape
    bias = getattr(module, "bias", None)
    part = Module(name, rows, columns, has_bias=isinstance(bias, torch.Tensor))
    specs = list(scheme.tensors(part))
    try:
        reader.check_tensors(specs)
    except CheckpointError as error:
        return f"not as the checkpoint has it: {error}"
    same = _is_as_stored(weight, reader.read(specs[0]), _scales(scheme, part, reader))
    if part.bias is not None and isinstance(bias, torch.Tensor):
        held, of_file = bias.detach().float(), reader.read(part.bias).to(bias.device).float()
        same = same and torch.allclose(held, of_file, rtol=_rtol(bias), atol=0)
    if not same:
        return "its weight or bias is not what the checkpoint holds, as after merging an adapter"
    factors = scheme.input_factors(part)
    if factors is not None and not reader.has(factors):
        factors = None
    target = Target(weight.device, dtype, batch_invariant=True)
    return QuantizedLinear(
        scheme.build(reader, [part], target),
        dtype,
        None if factors is None else read_scale(reader, factors, positive=True).to(weight.device),
    )


def _reason_to_leave(module: torch.nn.Module, weight: object) -> str | None:
    """Return why a module cannot be replaced, whatever the checkpoint holds; None if it can be."""
    kind = type(module)
    if _CLASSES.get(kind.__name__) != kind.__module__.partition(".")[0]:
        name = f"{kind.__module__}.{kind.__name__}"
        return f"its class {name} is none of {', '.join(_CLASSES)} of torch and transformers"
    if next(module.children(), None) is not None:
        return "it has modules of its own, as an adapter has"
    if not _has_known_forward(module):
        return "its forward has been replaced"
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return "it has no weight of two dimensions"
    if weight.is_meta:
        return "its weight is on the meta device, as where accelerate offloads it"
    hooks: list[Mapping] = [module._forward_hooks, module._forward_pre_hooks]
    if any(hooks) or hasattr(module, "_hf_hook"):
        return "it has hooks, which would no longer be called"
    return None


def _has_known_forward(module: torch.nn.Module) -> bool:
    """Return whether a module's forward is its class's, or what a quantiser has made of that."""
    forward = vars(module).get("forward")
    if forward is None:
        return True
    function = getattr(forward, "__func__", forward)
    source = getattr(function, "__globals__", {}).get("__name__", "")
    return str(source).partition(".")[0] in _WRAPPERS


def _scales(scheme: Any, part: Module, reader: CheckpointReader) -> torch.Tensor:
    """Return the file's scales of a weight [N, K] as [N or 1, ceil(K / 128) or 1]."""
    spec = scheme.weight_scale(part)
    scales = read_scale(reader, spec)
    if scales.numel() == 1 or spec.shape[0] == part.rows:
        return scales[:, None]
    blocks = scales.reshape(-(-part.rows // _BLOCK), -1)
    return blocks.repeat_interleave(_BLOCK, 0)[: part.rows]


def _rtol(held: torch.Tensor) -> float:
    # What is dequantised has been rounded, and so may the scale have been.
    eps = 0.0 if held.itemsize == 1 else torch.finfo(held.dtype).eps
    # What sums of 128 products in fp32 may be wrong by.
    return max(2 * eps, 1e-5)


def _is_as_stored(held: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether a model's weight has the codes of the file, or these times their scales.

    Args:
        held: [N, K], of the model.
        stored: of the file; of any shape is that of another module.
        scales: [N or 1, ceil(K / 128) or 1].
    """
    if held.shape != stored.shape:
        return False
    rtol = _rtol(held)
    rows = scales.expand(len(stored), -1)
    pieces = [x.split(_ROWS) for x in (held.detach(), stored, rows)]
    same = [
        [_is_multiple(ours, theirs.to(ours.device), factor, rtol) for factor in (of_file, one)]
        for ours, theirs, of_file in zip(*pieces, strict=True)
        for one in [torch.ones(1, 1)]
    ]
    return any(all(kind) for kind in zip(*same, strict=True))


def _is_multiple(
    held: torch.Tensor, stored: torch.Tensor, factors: torch.Tensor, rtol: float
) -> bool:
    """Return whether each block of columns is that of the file, times about its factor."""
    padding = (0, -held.size(1) % _BLOCK)
    ours, theirs = (
        functional.pad(x.float(), padding).unflatten(1, (-1, _BLOCK)) for x in (held, stored)
    )
    # The least-squares factor; a block of zeros has none, and any does.
    best = (ours * theirs).sum(2, keepdim=True) / theirs.square().sum(2, keepdim=True)
    expected = factors.to(held.device)[:, :, None].expand_as(best)
    if not torch.allclose(best.where(best.isfinite(), expected), expected, rtol=rtol, atol=0):
        return False
    return torch.allclose(ours, best.nan_to_num() * theirs, rtol=rtol, atol=0)
