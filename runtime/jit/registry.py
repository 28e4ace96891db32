"""Which variants there are: families are named here beside their ops, and selected by name.

What is named so far depends on what has been imported: `ostinato.ops.catalogue` imports every op
and gives all variants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .variant import FLOAT_DTYPES, OPERAND_DTYPES, Variant

_listed: dict[type[Variant], tuple[Variant, ...]] = {}


def register_family(family: type[Variant], listed: Iterable[Variant]) -> None:
    """Name a family and the variants of it that `build --all` compiles.

    Others of the family are compiled when they are first used; `Variant.name_pattern` lets them be
    named.

    Raises:
        ValueError: when another class has the family's name, or a variant is of another one.
    """
    for known in _listed:
        if known.family == family.family:
            raise ValueError(
                f"family: got {family.family!r} of {family.__module__}, expected a name that "
                f"{known.__module__} does not have"
            )
    variants = tuple(listed)
    for variant in variants:
        if type(variant) is not family:
            raise ValueError(f"listed: got {variant.name}, expected variants of {family.family}")
    _listed[family] = variants


def registered() -> tuple[Variant, ...]:
    """Return the listed variants of all families named so far, families in alphabetical order."""
    families = sorted(_listed, key=lambda family: family.family)
    return tuple(variant for family in families for variant in _listed[family])


def families(variants: Iterable[Variant]) -> list[str]:
    """Return the names of these variants' families, each once."""
    return list(dict.fromkeys(variant.family for variant in variants))


def variant_of(name: str) -> Variant | None:
    """Return the variant of this name; None if there is none, or its family is listed whole."""
    found = (family.from_name(name) for family in _listed)
    return next((variant for variant in found if variant is not None), None)


def select(
    among: Sequence[Variant],
    *,
    only: Sequence[str] = (),
    dtypes: Iterable[str] = (),
) -> list[Variant]:
    """Return the variants of these names and dtypes, in the order of `among`.

    Args:
        among: what to select from: mostly `ostinato.ops.catalogue.CATALOGUE`.
        only: families or names of variants, those that `among` does not list included; empty for
            all.
        dtypes: names as in `ostinato.jit.variant`; 8-bit ones choose among operands, the others
            among inputs and outputs, and a kind of which none is named is not restricted.

    Raises:
        ValueError: naming the argument, for a name that no variant has, or when nothing is left.
    """
    chosen = set(dtypes)
    known = (*OPERAND_DTYPES, *FLOAT_DTYPES)
    _check("dtypes", chosen, known)
    unlisted = [variant for name in only if (variant := variant_of(name)) is not None]
    among = list(dict.fromkeys((*among, *unlisted)))
    _check("only", only, {name for v in among for name in (v.family, v.name)}, families(among))
    accepted = set().union(
        *(chosen.intersection(kind) or kind for kind in (OPERAND_DTYPES, FLOAT_DTYPES))
    )
    found = [
        variant
        for variant in among
        if (not only or variant.family in only or variant.name in only)
        and variant.dtypes() <= accepted
    ]
    if not found:
        raise ValueError(f"no kernel of {' '.join(only)} has dtypes {' '.join(sorted(chosen))}")
    return found


def _check(
    argument: str, got: Iterable[str], known: Collection[str], shown: Iterable[str] = ()
) -> None:
    for name in got:
        if name not in known:
            expected = " or ".join(shown or known)
            raise ValueError(f"{argument}: got {name!r}, expected {expected}")
