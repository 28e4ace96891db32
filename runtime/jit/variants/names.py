"""Variants by name, of the families whose kernels are not all listed in the catalogue."""

from __future__ import annotations

import re
from typing import Any

from .attention import (
    AttentionDecode,
    AttentionPrefill,
)
from .base import Variant
from .rows import Quantize

# What follows the family: groups are fields, and what a name does not say has its default.
_FIELDS: dict[type[Variant], str] = {
    AttentionDecode: r"(?P<dtype>\w+)(-(?P<kv_dtype>\w+)_kv)?-d(?P<head_dim>\d+)-c(?P<columns>\d+)"
    r"(?P<any_page>-any_page)?(-split(?P<split_tokens>\d+))?(-cluster(?P<cluster>\d+))?",
    AttentionPrefill: r"(?P<dtype>\w+)(-(?P<out_dtype>\w+))?-d(?P<head_dim>\d+)"
    r"(v(?P<value_dim>\d+))?-(?P<keys>\w+)(-w(?P<warpgroups>\d+))?",
    Quantize: r"(?P<kind>\w+)-(?P<in_dtype>\w+)-(?P<out_dtype>\w+)"
    r"(-(?P<weight_dtype>\w+)_weight)?",
}


def variant_of(name: str) -> Variant | None:
    """Return the variant of this name; None if there is none, or its family is listed whole."""
    for family, pattern in _FIELDS.items():
        match = re.fullmatch(f"{family.family}-{pattern}", name, re.ASCII)
        if match is None:
            continue
        fields: dict[str, Any] = {
            field: int(text) if text.isdecimal() else text
            for field, text in match.groupdict().items()
            if text is not None
        }
        if fields.pop("any_page", None):
            fields["copy_pages"] = False
        try:
            variant = family(**fields)
        except ValueError:
            return None
        # A variant has one name: d080 is none of d80's.
        return variant if variant.name == name else None
    return None
