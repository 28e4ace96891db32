"""Variants of the kernels of one INT8 token with other macros, for run.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

from ostinato.jit.variant import Variant
from ostinato.ops.linear.fused_cuda import ActivatedLinear, FusedLinear

# Macros of a trial, for kernels whose codes are in shared memory (so that one slot does), for o and
# for down; "alone" is the branch as it is. Two CTAs that share an SM must not have more than 170
# registers a thread together (six warps of one partition may be theirs): all have 80 at most. Nor
# more than 226 KB: with hidden sizes above 4096 qkv, gate_up and o of "equal" are too large for two.
_TWO = {"OSTINATO_CTAS_PER_SM": "2"}
_SLOT, _SLOTS = {"OSTINATO_X_SLOTS": "1"}, {"OSTINATO_X_SLOTS": "4"}
_EQUAL = {"OSTINATO_RING_KB": "96"}
_SMALL = {"OSTINATO_RING_KB": "64", "OSTINATO_ROW_TILES": "1"}
_LATE = {"OSTINATO_LATE_SUCCESSOR": "1"}
_Macros = dict[str, str]


def _trial(large: _Macros, small: _Macros, late: _Macros) -> tuple[_Macros, _Macros, _Macros]:
    """Return macros of qkv and gate_up, of o, and of down."""
    both = {**_TWO, **late}
    return {**both, **_SLOT, **large}, {**both, **_SLOT, **small}, {**both, **_SLOTS, **small}


TRIALS: dict[str, tuple[_Macros, _Macros, _Macros]] = {
    "alone": ({}, {}, {}),
    "slot": (_SLOT, _SLOT, {}),
    "slots4": ({}, {}, _SLOTS),
    "equal": _trial(_EQUAL, _EQUAL, {}),
    "equal_late": _trial(_EQUAL, _EQUAL, _LATE),
    "turns": _trial({}, _SMALL, {}),
    "turns_late": _trial({}, _SMALL, _LATE),
}


@functools.cache
def tried(variant: Variant, trial: str) -> Variant:
    """Return a kernel with the macros of a trial; the head's (fp32 results) stays as it is."""
    large, o, down = TRIALS[trial]
    is_down = isinstance(variant, ActivatedLinear)
    macros = down if is_down else o if variant.kind == "per_token" else large
    if variant.out_dtype == "fp32" or not macros:
        return variant
    base: Any = type(variant)

    @dataclass(frozen=True, kw_only=True)
    class Tried(base):  # type: ignore[misc]
        @property
        def name(self) -> str:
            return f"{base.name.fget(self)}-{trial}"

        def defines(self) -> dict[str, str]:
            return {**base.defines(self), **macros}

    return Tried(**{field.name: getattr(variant, field.name) for field in fields(variant)})


def kernels_of(kernel: Variant, trial: str) -> Variant:
    """Return `tried` for kernels of one token, others as they are."""
    return tried(kernel, trial) if isinstance(kernel, FusedLinear | ActivatedLinear) else kernel
