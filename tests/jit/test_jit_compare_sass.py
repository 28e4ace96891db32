"""Which instructions count as the same: offsets of parameters may differ, nothing else."""

from __future__ import annotations

import pytest
from compare_sass import normalise

_KERNEL = """
	Function : {name}
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ULDC.64 UR4, c[0x0][{base}] ;
        /*0020*/                   UIADD3 UR6, UP0, UR4, {offset}, URZ ;
        /*0030*/                   {write}
        /*0040*/                   UIADD3 UR8, UP0, UR4, {later}, URZ ;
        /*0050*/                   LDG.E R2, c[{bank}][{parameter}] ;
"""
_SAME = {
    "name": "_Zkernel",
    "base": "0x198",
    "offset": "0x170",
    "write": "UMOV UR5, URZ ;",
    "later": "0x1f0",
    "bank": "0x0",
    "parameter": "0x218",
}


def text(**changes: str) -> str:
    return normalise(_KERNEL.format(**{**_SAME, **changes}))


@pytest.mark.parametrize(
    "change", [{"name": "_Zrenamed"}, {"parameter": "0x298"}, {"offset": "0x1f0"}, {"later": "0x8"}]
)
def test_names_and_offsets_do_not_count(change: dict[str, str]) -> None:
    assert text(**change) == text()


@pytest.mark.parametrize("change", [{"write": "UMOV UR5, UR6 ;"}, {"bank": "0x3"}])
def test_other_instructions_count(change: dict[str, str]) -> None:
    assert text(**change) != text()


@pytest.mark.parametrize("common", [{"base": "0x118"}, {"write": "UMOV UR4, URZ ;"}])
def test_numbers_added_to_anything_else_count(common: dict[str, str]) -> None:
    assert text(**common, later="0x8") != text(**common)
