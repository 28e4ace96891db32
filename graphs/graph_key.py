"""What a captured graph is found by: everything that its launches froze."""

from __future__ import annotations

from typing import NamedTuple

from .arguments import at_least_one


class Variant(NamedTuple):
    """What a step's launches freeze besides the batch size; no graph of one serves another.

    The step is told by `BatchView.variant`.

    Attributes:
        q_len: tokens of each row, as in the verification of a draft.
        name: anything else: an algorithm, a plan, which adapters are on.
    """

    q_len: int = 1
    name: str = ""

    def __str__(self) -> str:
        """Return what is not the default, for a message."""
        parts = [f"q_len {self.q_len}"] if self.q_len != 1 else []
        return ", ".join([*parts, repr(self.name)] if self.name else parts) or "default"


DEFAULT = Variant()


class Key(NamedTuple):
    """Batch size and variant of a captured graph."""

    batch_size: int
    variant: Variant = DEFAULT

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch, padding included."""
        return self.batch_size * self.variant.q_len

    def __str__(self) -> str:
        """Return the batch size, and the variant where it is not the default."""
        suffix = "" if self.variant == DEFAULT else f", {self.variant}"
        return f"batch size {self.batch_size}{suffix}"


def as_variant(argument: str, value: object) -> Variant:
    """Return `value` with a Python int for `q_len`.

    Raises:
        TypeError, ValueError: when it is not a Variant, or one of something else.
    """
    if not isinstance(value, Variant):
        raise TypeError(f"{argument}: got {value!r}, expected a Variant")
    q_len = at_least_one(f"{argument}.q_len", value.q_len)
    if not isinstance(value.name, str):
        raise TypeError(f"{argument}.name: got {value.name!r}, expected a string")
    return Variant(q_len, value.name)
