"""Quantises a plain checkpoint folder or its KV cache, in compressed-tensors format."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ..models import KVScales, ModelConfig
from ..models.layout import DecoderLayout
from ..models.modules import TensorSpec
from ..ops.common.sizes import ceil_div
from .calibration.kv_cache import calibrate_kv_cache
from .calibration.observe import observe, read_tokens
from .calibration.smooth import Smoothing, smoothing
from .companions import copy_companions, find_companions, require_own
from .config import load_config
from .errors import CheckpointError, UnsupportedCheckpointError
from .folder import checkpoint_folder
from .format import StoredSchemeOf
from .formats.compressed_tensors import COMPRESSED_TENSORS, ModuleNames, describe
from .layout import check_tied, checked_layout, with_plain_routers
from .new_folder import new_folder
from .patterns import PatternMatcher
from .quantization import load_quantization, quantization_config
from .reader import CheckpointReader, require_finite
from .section import CONFIG_FILE, Section
from .storage.base import StoredScheme
from .storage.dense import DENSE, unquantized
from .storage.fp8_block import BLOCK, FP8BlockScheme
from .storage.kv_cache import scale_names
from .storage.w8a8 import W8A8Scheme
from .text_tower import modules_to_ignore, spellings
from .weights import quantize_weight, quantize_weight_blocks
from .writer import CheckpointWriter, PlannedTensor

_Scheme = W8A8Scheme | FP8BlockScheme

SCHEMES: dict[str, _Scheme] = {
    "int8": W8A8Scheme(torch.int8, per_channel=True, static_input=False),
    "int8-asymmetric": W8A8Scheme(
        torch.int8, per_channel=True, static_input=False, symmetric_input=False
    ),
    "fp8": W8A8Scheme(torch.float8_e4m3fn, per_channel=True, static_input=False),
    "fp8-block": FP8BlockScheme(),
}
_EXPERTS_DIMENSIONS = 3  # of a weight [experts, rows, columns]
KV_CACHES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    scheme: str | None = None,
    ignore: Sequence[str] = ("lm_head",),
    kv_cache: str | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Quantise the linear layers of a checkpoint, its KV cache, or both.

    Weights are in 8 bits, activations are quantised at run time. Keys and values of the cache have
    a static scale each per layer: the largest magnitude that a text gives them, by 448 for FP8 and
    by 127.5 for INT8, as in compressed-tensors.

    The new folder is in compressed-tensors format and holds the weights with a scale per output
    row, or per block of 128 by 128 (in the model's dtype), every other tensor as it was, the
    tokenizer and the generation settings. Of a model with several towers the text tower is
    quantised. The folder appears whole or not at all: it is written beside `dst` under a temporary
    name, forced to disk, and renamed.
    On an error and on SIGINT, SIGTERM or SIGHUP nothing is left; what another signal leaves, the
    next run for the same `dst` removes. Links in `src` are followed within the folder and, in a
    snapshot of the Hugging Face Hub, to the blobs of its repository.
    Memory use is that of the largest tensor, with `calibrate` that of the model.

    Args:
        src: folder with a plain checkpoint, or its name on the Hugging Face Hub. For a KV cache
            alone weights may be quantised in compressed-tensors format.
        dst: folder to create; it must not exist, its parent must.
        scheme: "int8" or "fp8" (e4m3), with a scale per row of a weight and per token;
            "int8-asymmetric", with a zero point per token as well; or "fp8-block", with a scale per
            block of 128 by 128 and per 128 of a token. None leaves weights as they are, for a KV
            cache alone.
        ignore: modules to leave as they are: full names, "re:" and a regular expression, or the
            class name "Linear". Where they separate modules that the model joins (q, k, v;
            gate, up), each part becomes a product of its own.
        kv_cache: "int8" or "fp8" (e4m3) for an 8-bit KV cache; None for one in the model's dtype.
        calibrate: a text file, UTF-8, of which up to 2048 tokens are run through the model: the
            more it is like what will be served, the better. A `kv_cache` needs it for its scales.
            Before weights are rounded to INT8, input columns of layers are scaled by powers of two
            (SmoothQuant), which norms and rows in front take up, so that few large columns do not
            cost all others their precision.
        device: where the model is loaded for it.
        progress: show a progress bar, on a terminal only.
        max_shard_bytes: how much data one safetensors file may hold.

    Raises:
        CheckpointError: naming the file and the tensor, when something in `src` is missing,
            damaged, NaN or infinite, no regular file, or a link out of the folder; likewise when
            the text cannot be read.
        UnsupportedCheckpointError: when `src` is quantised already, but for a `kv_cache` alone
            beside weights in compressed-tensors format; or when `ignore` does not name an
            output projection that is tied to the embedding.
        UnsupportedModelError: for a model that is not implemented.
        ValueError: for another argument, `dst` existing among them, or a text that is too short or
            that makes keys or values NaN or infinite.
    """
    source, target = checkpoint_folder("src", src, CONFIG_FILE, weights=True), Path(dst)
    _check_arguments(target, scheme, ignore, max_shard_bytes)
    _check_calibration(scheme, kv_cache, calibrate)
    chosen_scheme = None if scheme is None else SCHEMES[scheme]
    config = load_config(source)
    quantized = quantization_config(source)
    scheme_of: StoredSchemeOf = unquantized
    if quantized is not None:
        _check_quantized(quantized, scheme)
        scheme_of = load_quantization(source, text_tower=config.text_tower).scheme_of
    companions = find_companions(source)
    with CheckpointReader(source, text_tower=config.text_tower) as reader:
        reader.check_layers(config.num_layers)
        layout = checked_layout(config, scheme_of, reader)
        scheme_of = with_plain_routers(scheme_of, layout)
        chosen = frozenset[str]()
        if chosen_scheme is not None:
            chosen = _choose(config, layout, chosen_scheme, ignore)
        specs = list(layout.tensors(scheme_of))
        reader.check(specs)
        require_own({source / CONFIG_FILE, *reader.files}, source)
        check_tied(reader, layout)
        factors, kv_scales = Smoothing(), None
        if calibrate is not None:
            tokens = read_tokens(calibrate, source, config.vocab_size)
            observed = observe(
                reader, config, layout, scheme_of, tokens, device=device, progress=progress
            )
            if _is_int8(chosen_scheme):
                factors = smoothing(
                    layout,
                    observed.inputs,
                    lambda module: reader.read(DENSE.weight(module)),
                    lambda module: DENSE.weight(module).name in chosen,
                )
            if kv_cache is not None:
                kv_scales = calibrate_kv_cache(observed.cache, KV_CACHES[kv_cache], layout, factors)
        with new_folder(target) as folder:
            conversion = _Conversion(
                reader, chosen_scheme, config.dtype, chosen, factors, kv_scales
            )
            conversion.run(_stored(specs, layout, reader), folder, max_shard_bytes, progress)
            whole = (*ignore, *_left_out(layout, reader))
            kv_dtype = None if kv_scales is None else kv_scales.dtype
            described = describe(chosen_scheme, whole, kv_dtype)
            if quantized is not None:
                described = {**quantized.fields, "kv_cache_scheme": described["kv_cache_scheme"]}
            _write_config(source, folder, described)
            copy_companions(companions, source, folder)


def _check_arguments(
    target: Path, scheme: str | None, ignore: Sequence[str], max_shard_bytes: int
) -> None:
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"scheme: got {scheme!r}, expected {' or '.join(map(repr, SCHEMES))}")
    if isinstance(ignore, str):
        raise TypeError(f"ignore: got the string {ignore!r}, expected a sequence of strings")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: got {max_shard_bytes}, expected at least 1")
    if os.path.lexists(target):
        raise ValueError(f"dst: got {target}, which exists; expected a new folder")
    if not target.parent.is_dir():
        raise ValueError(f"dst: got {target}, expected a new folder in an existing one")


def _check_calibration(
    scheme: str | None, kv_cache: str | None, calibrate: str | os.PathLike[str] | None
) -> None:
    if kv_cache is None:
        if scheme is None:
            raise ValueError("scheme: got None, expected one, or a kv_cache")
        if calibrate is not None and not _is_int8(SCHEMES[scheme]):
            raise ValueError(
                f"calibrate: got a text for {scheme!r}, expected None without kv_cache: of weights "
                "it is for INT8, the error of e4m3 being relative to each number"
            )
        return
    if kv_cache not in KV_CACHES:
        raise ValueError(f"kv_cache: got {kv_cache!r}, expected 'int8' or 'fp8'")
    if calibrate is None:
        raise ValueError("calibrate: got None, expected a text file with kv_cache")


def _is_int8(scheme: _Scheme | None) -> bool:
    return scheme is not None and scheme.dtype is torch.int8


def _check_quantized(config: Section, scheme: str | None) -> None:
    """Check that a quantised checkpoint may get scales of a KV cache."""
    method = config.get("quant_method")
    if scheme is not None or method != COMPRESSED_TENSORS or config.get("quantization_config"):
        raise UnsupportedCheckpointError(
            f"{config.where}: the checkpoint is quantised already ({method}); expected a plain "
            "one, or for a KV cache alone one of compressed-tensors"
        )
    config.reject("kv_cache_scheme", "the checkpoint is made for an 8-bit KV cache already")


def _stored(
    specs: Iterable[TensorSpec], layout: DecoderLayout, reader: CheckpointReader
) -> list[TensorSpec]:
    """Return the tensors that the reader holds, less a copy of a tied embedding."""
    copy = layout.tied_output
    return [spec for spec in specs if (copy is None or spec is not copy.spec) and reader.has(spec)]


def _left_out(layout: DecoderLayout, reader: CheckpointReader) -> Iterator[str]:
    """Yield what describes the modules that are never quantised, as the format's `ignore` does."""
    towers = [name for name in reader.others if not name.startswith(layout.unused)]
    yield from modules_to_ignore(towers)
    yield from (f"re:{re.escape(prefix)}" for prefix in layout.unused)
    for part in layout.linears():
        if part.chooses:
            yield from (reader.stored_name(module.name) for module in part.modules)


def _choose(
    config: ModelConfig, layout: DecoderLayout, scheme: _Scheme, ignore: Sequence[str]
) -> frozenset[str]:
    """Return the names of the weights to quantise, refusing an `ignore` that makes no sense."""
    matcher = PatternMatcher("ignore")
    ignored = ModuleNames(ignore, matcher)

    def names_of(module: str) -> tuple[str, ...]:
        return spellings(module) if config.text_tower else (module,)

    def scheme_of(*modules: str) -> StoredScheme:
        names = (name for module in modules for name in names_of(module))
        return DENSE if ignored.find(*names) else scheme

    checked_layout(config, scheme_of)
    linears = list(layout.to_quantize())
    modules = [*(module.name for module in linears), "lm_head"]
    for pattern in ignore:
        # A misspelt name would let a module be quantised that was meant to stay as it is.
        entry = ModuleNames([pattern], matcher)
        if not any(entry.find(*names_of(module)) for module in modules):
            raise ValueError(
                f"ignore: got {pattern!r}, which matches no linear module of the model; "
                f"expected names such as {modules[0]}"
            )
    return frozenset(
        scheme.weight(module).name for module in linears if scheme_of(module.name) == scheme
    )


@dataclass
class _Conversion:
    """Reads tensors and writes them again, those called `chosen` in 8 bits, and scales."""

    reader: CheckpointReader
    scheme: _Scheme | None
    scale_dtype: torch.dtype
    chosen: frozenset[str]
    factors: Smoothing
    kv_scales: KVScales | None

    def run(
        self, specs: Sequence[TensorSpec], folder: Path, max_shard_bytes: int, progress: bool
    ) -> None:
        planned = [tensor for spec in specs for tensor in self._plan(spec)]
        planned += [_as_it_is(name, self.reader.read_other(name)) for name in self.reader.others]
        scales = self._scales_of_cache()
        planned += [_as_it_is(name, scale) for name, scale in scales.items()]
        writer = CheckpointWriter(folder, planned, max_shard_bytes)
        for spec in tqdm(
            specs, desc="Quantising", unit="tensor", disable=None if progress else True
        ):
            self._convert(spec, writer)
        for name in self.reader.others:
            writer.write(name, self.reader.read_other(name))
        for name, scale in scales.items():
            writer.write(name, scale)

    def _scales_of_cache(self) -> dict[str, torch.Tensor]:
        """Return the static scales of the KV cache, [1] each, by their names in the file."""
        found: dict[str, torch.Tensor] = {}
        if self.kv_scales is None or self.kv_scales.k is None or self.kv_scales.v is None:
            return found
        for layer, pair in enumerate(zip(self.kv_scales.k, self.kv_scales.v, strict=True)):
            for name, scale in zip(scale_names(layer), pair, strict=True):
                # fp32: of 16 bits a rounded scale may be 0, or let the largest number saturate.
                found[self.reader.stored_name(name)] = scale.reshape(1).float()
        return found

    def _plan(self, spec: TensorSpec) -> Iterator[PlannedTensor]:
        name = self._name(spec)
        if spec.name in self.chosen:
            assert self.scheme is not None, "it has chosen"
            yield PlannedTensor(name, self.scheme.dtype, spec.shape)
            yield PlannedTensor(_scale_name(name), self.scale_dtype, self._scale_shape(spec))
        else:
            yield _as_it_is(name, self.reader.read(spec))

    def _name(self, spec: TensorSpec) -> str:
        """Return what a tensor is called: that of experts together as it was, others as usual."""
        if len(spec.shape) == _EXPERTS_DIMENSIONS:
            return self.reader.found_name(spec)
        return self.reader.stored_name(spec.name)

    def _scale_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        *experts, rows, columns = spec.shape
        if isinstance(self.scheme, FP8BlockScheme):
            return *experts, ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)
        return *experts, rows, 1

    def _convert(self, spec: TensorSpec, writer: CheckpointWriter) -> None:
        tensor, name = self.reader.read(spec), self._name(spec)
        try:
            if spec.name not in self.chosen:
                require_finite(self.reader, spec)
                writer.write(name, self.factors.apply(spec.name, tensor))
                return
            if tensor.dim() == _EXPERTS_DIMENSIONS:
                pairs = [self._quantized(spec.name, of_expert) for of_expert in tensor]
                values, scale = (torch.stack(found) for found in zip(*pairs, strict=True))
            else:
                values, scale = self._quantized(spec.name, tensor)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{self.reader.where(spec)}: {error}") from error
        writer.write(name, values)
        writer.write(_scale_name(name), scale)

    def _quantized(self, name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a weight [rows, columns] in 8 bits, and its scales."""
        assert self.scheme is not None, "it has chosen"
        if isinstance(self.scheme, FP8BlockScheme):
            return quantize_weight_blocks(weight, self.scale_dtype)
        smooth = self.factors.apply(name, weight)
        return quantize_weight(smooth, self.scheme.dtype, self.scale_dtype)


def _as_it_is(name: str, tensor: torch.Tensor) -> PlannedTensor:
    return PlannedTensor(name, tensor.dtype, tuple(tensor.shape))


def _scale_name(weight: str) -> str:
    return f"{weight}_scale"


def _write_config(source: Path, target: Path, quantization: dict[str, object]) -> None:
    fields = Section.read(source / CONFIG_FILE).fields
    config = {**fields, "quantization_config": quantization}
    config.pop("compression_config", None)  # how first versions of the package called it
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
