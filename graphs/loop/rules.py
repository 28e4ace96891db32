"""How a step feeds itself: what becomes of each input between two steps of a burst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..arguments import as_integer, at_least_one
from ..buffer_spec import BufferSpec, as_rows
from ..outputs import Outputs

_INTEGERS = (torch.int32, torch.int64)
OutputKey = str | int | None


@dataclass(frozen=True)
class Feed:
    """The buffer takes what the step returned: the key of a dict, the index of a tuple, or None.

    That must not be a view of a buffer.
    """

    output: OutputKey


@dataclass(frozen=True)
class Add:
    """The buffer's number grows by `amount`."""

    amount: int = 1


@dataclass(frozen=True)
class Slot:
    """The buffer's number becomes the place of a position in memory that is divided into pages.

    That is `table[row, position // page_size] * page_size + position % page_size`, where `position`
    is the row of the buffer `positions` after its own rule was applied. A row whose table has no
    page there (the table's `pad`, or no column) ends.
    """

    table: str
    positions: str
    page_size: int


Rule = Feed | Add | Slot


@dataclass(frozen=True)
class BurstRules:
    """Rules by which a step is repeated without the host.

    Args:
        next: for each buffer that changes from step to step, how. The others keep their values.
        record: which output holds the token of each row: int32 or int64, one number per row.
        max_steps: the most steps of a burst; the host's memory holds the tokens of all of them.
        max_stops: the most tokens that end a row.

    Raises:
        TypeError, ValueError: when an argument is of the wrong kind or out of range.
    """

    next: Mapping[str, Rule]
    record: OutputKey = "tokens"
    max_steps: int = field(default=256, kw_only=True)
    max_stops: int = field(default=8, kw_only=True)

    def __post_init__(self) -> None:
        """Check what can be checked without the buffers."""
        if not isinstance(self.next, Mapping):
            raise TypeError(f"next: got {type(self.next).__name__}, expected a mapping")
        for name, rule in self.next.items():
            if not isinstance(rule, Feed | Add | Slot):
                raise TypeError(f"next[{name!r}]: got {rule!r}, expected Feed, Add or Slot")
            if isinstance(rule, Add):
                as_integer(f"next[{name!r}].amount", rule.amount)
            if isinstance(rule, Slot):
                at_least_one(f"next[{name!r}].page_size", rule.page_size)
        for argument, least in (("max_steps", 1), ("max_stops", 0)):
            if as_integer(argument, getattr(self, argument)) < least:
                raise ValueError(
                    f"{argument}: got {getattr(self, argument)}, expected at least {least}"
                )

    def check_buffers(self, specs: Mapping[str, BufferSpec]) -> None:
        """Refuse rules that do not fit the buffers.

        Raises:
            ValueError: with the rule.
        """
        for name, rule in self.next.items():
            where = f"next[{name!r}]"
            if name not in specs:
                raise ValueError(f"{where}: no such buffer, only {sorted(specs)}")
            if isinstance(rule, Add | Slot):
                _check_integers(where, name, specs, ())
            if isinstance(rule, Add):
                limits = torch.iinfo(specs[name].dtype)
                if not limits.min <= rule.amount <= limits.max:
                    raise ValueError(
                        f"{where}.amount: got {rule.amount}, which {specs[name].dtype} cannot hold"
                    )
            if isinstance(rule, Slot):
                _check_integers(f"{where}.positions", rule.positions, specs, ())
                columns = specs[rule.table].shape if rule.table in specs else ()
                _check_integers(f"{where}.table", rule.table, specs, columns[:1] or (1,))
                if rule.table in self.next or isinstance(self.next.get(rule.positions), Slot):
                    raise ValueError(
                        f"{where}: its table changes, or its positions are slots themselves"
                    )

    def check_outputs(self, specs: Mapping[str, BufferSpec], outputs: Outputs) -> None:
        """Refuse rules that do not fit what the step returns.

        Raises:
            ValueError: with the rule.
        """
        recorded = output_of(outputs, self.record, "record")
        if recorded.dtype not in _INTEGERS or recorded.ndim != 1:
            raise ValueError(
                f"record: got {recorded.dtype} {tuple(recorded.shape)}, expected int32 or int64, "
                "one number per row"
            )
        for name, rule in self.next.items():
            if isinstance(rule, Feed):
                fed, spec = output_of(outputs, rule.output, f"next[{name!r}]"), specs[name]
                if fed.dtype != spec.dtype or fed.shape[1:] != spec.shape:
                    raise ValueError(
                        f"next[{name!r}]: got rows {tuple(fed.shape[1:])} of {fed.dtype}, expected "
                        f"the buffer's {spec.shape} of {spec.dtype}"
                    )
                if not fed[0].is_contiguous():
                    raise ValueError(f"next[{name!r}]: got strided rows, expected contiguous ones")

    def check_pages(
        self,
        specs: Mapping[str, BufferSpec],
        inputs: Mapping[str, object],
        limits: Sequence[int],
        device: torch.device,
    ) -> None:
        """Refuse inputs whose page tables do not hold all steps, as far as the host can see them.

        Inputs on the device are not looked at: there, a row ends where its pages do.

        Raises:
            TypeError, ValueError: with the row.
        """
        for name, rule in self.next.items():
            if not isinstance(rule, Slot) or not {rule.table, rule.positions} <= inputs.keys():
                continue
            moves = self.next.get(rule.positions, Add(0))
            table, positions = (
                as_rows(key, inputs[key], specs[key], len(limits), device)
                for key in (rule.table, rule.positions)
            )
            if isinstance(moves, Add) and table.is_cpu and positions.is_cpu:
                later = torch.arange(1, max(limits), device="cpu")
                places = positions.long()[:, None] + moves.amount * later
                room = _steps_with_pages(table, places, rule.page_size, specs[rule.table].pad)
                for row, (steps, limit) in enumerate(zip(room, limits, strict=True)):
                    if steps < limit:
                        raise ValueError(
                            f"inputs[{rule.table!r}]: row {row} has pages for {steps} steps, "
                            f"expected its {limit}: next[{name!r}] finds no page after that"
                        )


def name_of(key: OutputKey) -> str:
    """Return the name of an output, as `Outputs` has it."""
    return "output" if key is None else f"output[{key!r}]"


def output_of(outputs: Outputs, key: OutputKey, what: str) -> torch.Tensor:
    """Return an output by its key.

    Raises:
        ValueError: when there is no such output.
    """
    name = name_of(key)
    for known, tensor in zip(outputs.names, outputs.tensors, strict=True):
        if known == name:
            return tensor
    raise ValueError(f"{what}: the step has no {name}, only {', '.join(outputs.names)}")


def _steps_with_pages(
    table: torch.Tensor, places: torch.Tensor, page_size: int, pad: float
) -> list[int]:
    """Return how many steps each row can take; `places` [n, steps - 1] are those of all but one."""
    columns = places.div(page_size, rounding_mode="floor")
    inside = (columns >= 0) & (columns < table.size(1))
    pages = table.gather(1, columns.clamp(0, table.size(1) - 1))
    held = (inside & (pages != pad)).long()
    steps: list[int] = (1 + held.cumprod(1).sum(1)).tolist()
    return steps


def _check_integers(
    where: str, name: str, specs: Mapping[str, BufferSpec], shape: tuple[int, ...]
) -> None:
    if name not in specs:
        raise ValueError(f"{where}: no buffer {name!r}, only {sorted(specs)}")
    spec = specs[name]
    if spec.dtype not in _INTEGERS or spec.shape != shape:
        rows = "one row of columns" if shape else "one number"
        raise ValueError(
            f"{where}: {name!r} has {spec.shape} of {spec.dtype} per row, expected {rows} of int32 "
            "or int64"
        )
