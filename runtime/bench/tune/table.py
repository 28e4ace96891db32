"""The file of tuned choices that `ostinato.ops.linear.tile_tuning` reads, and rows of times."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...ops.linear import tile_tuning
from ...ops.linear.tile_table import Choice
from ...ops.linear.tile_tuning import TunedRow, Tuning
from .. import machine
from ..gemm.cases import Case, Shape
from ..report import Report
from .run import Timed, Tuned


@dataclass
class _Document(Report):
    """`source` is the hash of the kernels' sources that were measured."""

    source: str = ""


class Table:
    """Choices by dtype and shape, to be added to.

    Args:
        gpu: the name of the GPU that they hold for.
        known: choices that hold for it and for the sources as they are.
    """

    def __init__(self, gpu: str, known: Tuning) -> None:
        self._gpu = gpu
        self._put: set[tuple[str, Shape]] = set()
        self._rows = {(dtype, Shape(n, k)): list(rows) for (dtype, n, k), rows in known.items()}

    def covers(self, dtype: str, shape: Shape, tokens: Iterable[int]) -> bool:
        """Return whether there are choices for the dtype, the shape and all of these tokens."""
        rows = self._rows.get((dtype, shape), [])
        return all(any(row.m_min <= m <= row.m_max for row in rows) for m in tokens)

    def put(self, dtype: str, shape: Shape, tuned: Sequence[Tuned], m_min: int) -> None:
        """Put choices in the place of those for the dtype, the shape and as many tokens.

        Args:
            dtype: "int8", "e4m3" or "bf16".
            shape: of the weights.
            tuned: at least one, m ascending.
            m_min: the smallest m that was timed.
        """
        kept = [
            # What ends among the new rows ends before them; what ends after them counts after them.
            replace(row, m_max=min(row.m_max, m_min - 1)) if row.m_max <= tuned[-1].m else row
            for row in self._rows.get((dtype, shape), [])
            if row.m_min < m_min or row.m_max > tuned[-1].m
        ]
        rows = [*kept, *(TunedRow(m_min, row.m, row.choice) for row in tuned)]
        self._rows[dtype, shape] = sorted(rows, key=lambda row: row.m_max)
        self._put.add((dtype, shape))

    def write(self, path: Path) -> None:
        """Write the document, with the versions and the commit of now.

        Of what was not put here it keeps what the file has by now: another run may add to it.

        Raises:
            OSError, ValueError: when it cannot be written, or is another GPU's by now.
        """
        folder = os.open(path.absolute().parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            for (dtype, n, k), theirs in known_choices(path, self._gpu).items():
                if (dtype, Shape(n, k)) not in self._put:
                    self._rows[dtype, Shape(n, k)] = list(theirs)
            self._document().write(path)
        finally:
            os.close(folder)

    def _document(self) -> _Document:
        rows: list[Any] = [
            {
                "dtype": dtype,
                "n": shape.n,
                "k": shape.k,
                "m_min": row.m_min,
                "m_max": row.m_max,
                **_fields(row.choice),
            }
            for (dtype, shape), of_shape in self._rows.items()
            for row in of_shape
        ]
        versions, source = machine.versions(), tile_tuning.sources_hash()
        return _Document(self._gpu, versions, machine.commit(), rows, source)


def known_choices(path: Path, gpu: str) -> Tuning:
    """Return the choices in a file, none when there is no file or it is of other sources.

    Raises:
        OSError, ValueError: when it cannot be read, is no such document, or holds rows of another
            GPU, which are not to be written over.
    """
    if not path.exists():
        return {}
    document = tile_tuning.read_document(path)
    if document["rows"] and document["gpu"] != gpu:
        raise ValueError(
            f"{path}: got rows of {document['gpu']}, expected {gpu}'s: name another file by "
            f"--out, which the ops read if {tile_tuning.VARIABLE} names it, too"
        )
    return tile_tuning.read(path, gpu)


def time_row(dtype: str, case: Case, timed: Timed) -> Mapping[str, Any]:
    """Return the row of a choice that was timed in a case; "final" when it was so in full."""
    return {
        "dtype": dtype,
        "n": case.shape.n,
        "k": case.shape.k,
        "m": case.m,
        **_fields(timed.choice),
        "us": round(timed.us, 3),
        "final": timed.final,
    }


def _fields(choice: Choice) -> dict[str, Any]:
    return {"variant": choice.variant.name, **choice.cut}
