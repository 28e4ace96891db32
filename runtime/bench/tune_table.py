"""The file of tuned choices that `ostinato.ops.gemm_tuning` reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ostinato.bench import machine
from ostinato.bench.gemm_cases import Case, Shape
from ostinato.bench.report import Report
from ostinato.bench.tune import Timed, Tuned
from ostinato.ops import gemm_tuning
from ostinato.ops.gemm_table import Choice
from ostinato.ops.gemm_tuning import Tuning


@dataclass(frozen=True)
class TableRow:
    """A choice for products of a dtype, n and k, and for m up to `m_max`."""

    dtype: str
    n: int
    k: int
    m_max: int
    variant: str
    tile_channels: int
    tile_tokens: int
    cluster: int
    band: int

    @staticmethod
    def of(dtype: str, shape: Shape, m_max: int, choice: Choice) -> TableRow:
        """Return the row of a choice."""
        return TableRow(
            dtype,
            shape.n,
            shape.k,
            m_max,
            choice.variant.name,
            choice.tile_channels,
            choice.tile_tokens,
            choice.cluster,
            choice.band,
        )


@dataclass
class _Document(Report):
    """`source` is the hash of the kernels' sources that were measured."""

    source: str = ""


class Table:
    """Choices by dtype and shape, to be added to.

    Args:
        gpu: the name of the GPU that they hold for.
        found: what is known already; left out if it does not hold for this GPU and the sources
            as they are.
    """

    def __init__(self, gpu: str, found: Tuning | None = None) -> None:
        self._gpu = gpu
        self._source = gemm_tuning.sources_hash()
        self._rows: dict[tuple[str, Shape], list[TableRow]] = {}
        if found is not None and (found.gpu, found.source) == (gpu, self._source):
            for (dtype, n, k), rows in found.rows.items():
                shape = Shape(n, k)
                self._rows[dtype, shape] = [
                    TableRow.of(dtype, shape, row.m_max, row.choice) for row in rows
                ]

    def __contains__(self, key: tuple[str, Shape]) -> bool:
        return key in self._rows

    def put(self, dtype: str, shape: Shape, tuned: Iterable[Tuned]) -> None:
        """Put choices in the place of those for the dtype and shape."""
        self._rows[dtype, shape] = [TableRow.of(dtype, shape, row.m, row.choice) for row in tuned]

    def write(self, path: Path) -> None:
        """Write the document, with the versions and the commit of now.

        Raises:
            OSError: when it cannot be written.
        """
        rows = [row for of_shape in self._rows.values() for row in of_shape]
        _Document(
            self._gpu, machine.versions(), machine.commit(), [*rows], source=self._source
        ).write(path)


@dataclass(frozen=True)
class TimeRow:
    """One choice's microseconds in one case; `final` when measured in full."""

    dtype: str
    n: int
    k: int
    m: int
    variant: str
    tile_channels: int
    tile_tokens: int
    cluster: int
    band: int
    us: float
    final: bool

    @staticmethod
    def of(dtype: str, case: Case, timed: Timed) -> TimeRow:
        """Return the row of a choice that was timed."""
        choice = timed.choice
        return TimeRow(
            dtype,
            case.shape.n,
            case.shape.k,
            case.m,
            choice.variant.name,
            choice.tile_channels,
            choice.tile_tokens,
            choice.cluster,
            choice.band,
            round(timed.us, 3),
            timed.final,
        )
