"""The compressed-tensors format: which modules its configuration quantises, and how.

Field names and matching rules are those of the compressed-tensors package, see its
`quantization/quant_args.py`, `quantization/quant_scheme.py` and `utils/match.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from ..errors import CheckpointError, UnsupportedCheckpointError
from ..format import Format, Quantization
from ..patterns import PatternMatcher
from ..section import Section
from ..storage.base import StoredScheme
from ..storage.dense import DENSE
from ..storage.fp8_block import BLOCK, FP8BlockScheme
from ..storage.kv_cache import describe_kv_cache, kv_cache_scheme
from ..storage.w8a8 import W8A8Scheme

COMPRESSED_TENSORS = "compressed-tensors"  # the format's `quant_method`

# Class name of every module that can be quantised, as targets and ignore lists spell it.
_CLASS = "Linear"
_REGEX = "re:"

_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}
_FORMAT_TYPES = {
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
_PER_GROUP = "mixed-precision"
_DENSE_FORMAT = "dense"  # no module is quantised, only the KV cache

_COARSE = "are not supported, only one scale per tensor, row of a weight, or token"
_BLOCK_FP8 = f"FP8 weights in blocks of {BLOCK} by {BLOCK}, activations in groups of {BLOCK}"
_BLOCKS = f"block scales {_COARSE}, or {_BLOCK_FP8}"
_GROUPS = f"group scales {_COARSE}, or {_BLOCK_FP8}"

# A scheme that files in this format may ask for.
_Quantized = W8A8Scheme | FP8BlockScheme

# Fields without a meaning for inference: observers belong to calibration, and the dtypes of
# scales and zero points are those of the tensors in the file.
_HARMLESS_FIELDS = ("global_compression_ratio", "quant_method", "run_compressed", "version")
_HARMLESS_ARGUMENTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def parse_compressed_tensors(config: Section) -> Quantization:
    """Return the schemes of linear modules and KV cache of a compressed-tensors configuration.

    Raises:
        CheckpointError: when the configuration is malformed.
        UnsupportedCheckpointError: naming the field, when it asks for anything but INT8 or FP8
            weights (symmetric, per tensor or channel) with activations of the same type (INT8 with
            zero points, too), or FP8 weights in blocks of 128 by 128 with activations in groups of
            128.
    """
    if config.get("quantization_config"):  # wrapped, as some versions of transformers wrote it
        inner = config.child("quantization_config")
        _require_dense(config)
        config.reject_others(*_HARMLESS_FIELDS)
        config = inner
    kv_cache = kv_cache_scheme(config)
    _require_dense(config)
    config.choice("quantization_status", "compressed", "frozen", default="compressed")
    file_format = config.choice("format", *_FORMAT_TYPES, _PER_GROUP, _DENSE_FORMAT)
    ignore = config.strings("ignore")
    groups = config.child("config_groups")
    if file_format == _DENSE_FORMAT and groups.fields:
        raise config.refusal("format", "config_groups quantise modules")
    schemes: dict[str, _Quantized] = {}
    for name in groups.fields:
        targets, scheme = _group(
            groups.child(name), None if file_format == _PER_GROUP else file_format
        )
        schemes.update(dict.fromkeys(targets, scheme))
    config.reject_others(*_HARMLESS_FIELDS)
    matcher = PatternMatcher(config.where)
    ignored, targeted = ModuleNames(ignore, matcher), ModuleNames(schemes, matcher)

    @cache
    def scheme_of(*names: str) -> StoredScheme:
        target = None if ignored.find(*names) else targeted.find(*names)
        return DENSE if target is None else schemes[target]

    return Quantization(scheme_of, kv_cache)


class ModuleNames:
    """Targets or an ignore list: the class "Linear", modules' names, and regular expressions.

    Args:
        entries: a regular expression follows "re:" and matches from the name's beginning.
        matcher: of the configuration that holds the entries.

    Raises:
        CheckpointError: naming a regular expression that is malformed.
    """

    def __init__(self, entries: Iterable[str], matcher: PatternMatcher) -> None:
        self._matcher = matcher
        self._names = frozenset(entries)
        self._patterns = sorted(name for name in self._names if name.startswith(_REGEX))
        self.find("")  # a malformed pattern is refused now, not in mid-load

    def find(self, *names: str) -> str | None:
        """Return the entry that means a module: one of its names before patterns before the class.

        Raises:
            CheckpointError: naming a regular expression that takes too long.
        """
        for name in names:
            if name in self._names:
                return name
        for entry in self._patterns:
            pattern = entry.removeprefix(_REGEX)
            if any(self._matcher.matches(pattern, name) for name in names):
                return entry
        return _CLASS if _CLASS in self._names else None


def describe(
    scheme: _Quantized | None, ignore: Sequence[str], kv_cache: torch.dtype | None = None
) -> dict[str, object]:
    """Return the configuration of a checkpoint whose linear modules all have `scheme`.

    Only what the quantiser writes: per-channel weights with dynamic per-token activations, or FP8
    weights in blocks with activations in groups.

    Args:
        scheme: None where no module is quantised.
        ignore: modules that are not.
        kv_cache: dtype of an 8-bit KV cache with a static scale per layer; None without one.
    """
    described = None if kv_cache is None else describe_kv_cache(kv_cache)
    if scheme is None:
        return {
            "quant_method": COMPRESSED_TENSORS,
            "format": _DENSE_FORMAT,
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": described,
        }
    weights: dict[str, object] = {"strategy": "channel", "group_size": None}
    activations: dict[str, object] = {"strategy": "token", "group_size": None}
    if isinstance(scheme, FP8BlockScheme):
        kind = "float"
        weights = {**weights, "strategy": "block", "block_structure": [BLOCK, BLOCK]}
        activations = {"strategy": "group", "group_size": BLOCK}
    else:
        kind = next(name for name, dtype in _DTYPES.items() if dtype is scheme.dtype)
        activations["symmetric"] = scheme.symmetric_input
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": [_CLASS],
                "weights": {**common, **weights, "dynamic": False},
                "input_activations": {**common, **activations, "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": described,
    }


def _group(group: Section, default_format: str | None) -> tuple[tuple[str, ...], _Quantized]:
    """Return (targets, scheme)."""
    targets = group.strings("targets")
    if not targets:
        raise CheckpointError(f"{group.where}: targets: got none, expected at least one")
    for name in ("weights", "input_activations"):
        if group.get(name) is None:
            raise UnsupportedCheckpointError(
                f"{group.where}: {name}: not quantised; only 8-bit weights together with 8-bit "
                "activations are supported"
            )
    file_format = group.choice("format", *_FORMAT_TYPES, default=default_format)
    kinds = _FORMAT_TYPES[file_format]
    weights, activations = group.child("weights"), group.child("input_activations")
    scheme: _Quantized
    if weights.get("strategy") == "block":
        scheme = _in_blocks(weights, activations, kinds)
    else:
        kind, per_channel = _weights(weights, kinds)
        static, symmetric = _activations(activations, kind)
        scheme = W8A8Scheme(_DTYPES[kind], per_channel, static, symmetric)
    group.reject("output_activations", "quantised outputs are not supported")
    group.reject_others()
    return targets, scheme


def _in_blocks(weights: Section, activations: Section, kinds: Sequence[str]) -> FP8BlockScheme:
    """Check weights with a scale per block, and activations with one per group."""
    weights.choice("block_structure", [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
    weights.choice("group_size", None)
    weights.choice("dynamic", False, default=False)
    activations.choice("strategy", "group")
    activations.choice("group_size", BLOCK)
    activations.choice("dynamic", True)
    activations.reject("block_structure", _BLOCKS)
    for arguments in (weights, activations):
        _require_eight_bits(arguments, [kind for kind in kinds if kind == "float"])
        arguments.choice("symmetric", True, default=True)
        arguments.reject_others(*_HARMLESS_ARGUMENTS)
    return FP8BlockScheme()


def _weights(arguments: Section, kinds: Sequence[str]) -> tuple[str, bool]:
    """Return (type, per channel)."""
    kind = _eight_bits(arguments, kinds)
    implied = "tensor" if arguments.choice("group_size", None, -1) is None else "channel"
    strategy = arguments.choice("strategy", "channel", "tensor", default=implied)
    arguments.choice("symmetric", True, default=True)
    arguments.choice("dynamic", False, default=False)
    arguments.reject_others(*_HARMLESS_ARGUMENTS)
    return kind, strategy == "channel"


def _require_coarse(arguments: Section) -> None:
    """Check that no scale belongs to less than a row or a token."""
    for name, reason in (("block", _BLOCKS), ("group", _GROUPS), ("tensor_group", _GROUPS)):
        if arguments.get("strategy") == name:
            raise arguments.refusal("strategy", reason)
    arguments.reject("block_structure", _BLOCKS)
    if arguments.get("group_size") not in (None, -1):
        raise arguments.refusal("group_size", _GROUPS)


def _require_dense(config: Section) -> None:
    """Check that a configuration of sparsity, which dense weights may have as well, says so."""
    if config.get("sparsity_config"):
        config.child("sparsity_config").choice("format", "dense")


def _activations(arguments: Section, kind: str) -> tuple[bool, bool]:
    """Return (static, symmetric)."""
    _eight_bits(arguments, (kind,))
    dynamic: bool = arguments.choice("dynamic", False, True, default=False)
    strategies: tuple[str, ...]
    if not dynamic:
        strategies = ("tensor",)
    elif kind == "int":
        strategies = ("token",)
    else:
        # One dynamic scale for a whole batch would make a row's result depend on its
        # neighbours; FP8 files that ask for it get one per token, which is never coarser.
        strategies = ("token", "tensor")
    arguments.choice("strategy", *strategies, default="tensor")
    arguments.choice("group_size", None)
    asymmetric = (False,) if kind == "int" else ()
    symmetric: bool = arguments.choice("symmetric", True, *asymmetric, default=True)
    arguments.reject_others(*_HARMLESS_ARGUMENTS)
    return not dynamic, symmetric


def _eight_bits(arguments: Section, kinds: Sequence[str]) -> str:
    """Check what weights and activations without blocks have in common; return the type."""
    _require_coarse(arguments)
    return _require_eight_bits(arguments, kinds)


def _require_eight_bits(arguments: Section, kinds: Sequence[str]) -> str:
    """Check what all weights and activations have in common; return the type."""
    arguments.choice("num_bits", 8, default=8)
    # The other orders of calibration leave columns where they are, too, unlike "group".
    arguments.choice("actorder", None, False, "weight", "static")
    kind: str = arguments.choice("type", *kinds, default="int")
    return kind


def _find(config: Section, folder: Path) -> Section | None:
    """Return the configuration as the package's first versions wrote it, None without one."""
    return config.child("compression_config") if config.get("compression_config") else None


FORMAT = Format(COMPRESSED_TENSORS, parse_compressed_tensors, _find)
