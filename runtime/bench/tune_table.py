"""The file of tuned choices that `ostinato.ops.gemm_tuning` reads, and rows of times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.bench import machine
from ostinato.bench.gemm_cases import Case, Shape
from ostinato.bench.report import Report
from ostinato.bench.tune import Timed, Tuned
from ostinato.ops import gemm_tuning
from ostinato.ops.gemm_table import Choice
from ostinato.ops.gemm_tuning import Tuning


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
        self._rows: dict[tuple[str, Shape], list[dict[str, Any]]] = {}
        for (dtype, n, k), rows in known.items():
            self._put(dtype, Shape(n, k), ((row.m_max, row.choice) for row in rows))

    def __contains__(self, key: tuple[str, Shape]) -> bool:
        return key in self._rows

    def put(self, dtype: str, shape: Shape, tuned: Iterable[Tuned]) -> None:
        """Put choices in the place of those for the dtype and shape."""
        self._put(dtype, shape, ((row.m, row.choice) for row in tuned))

    def write(self, path: Path) -> None:
        """Write the document, with the versions and the commit of now.

        Raises:
            OSError: when it cannot be written.
        """
        rows: list[Any] = [row for of_shape in self._rows.values() for row in of_shape]
        versions, source = machine.versions(), gemm_tuning.sources_hash()
        _Document(self._gpu, versions, machine.commit(), rows, source).write(path)

    def _put(self, dtype: str, shape: Shape, choices: Iterable[tuple[int, Choice]]) -> None:
        self._rows[dtype, shape] = [
            {"dtype": dtype, "n": shape.n, "k": shape.k, "m_max": m_max, **_fields(choice)}
            for m_max, choice in choices
        ]


def known_choices(path: Path, gpu: str) -> Tuning:
    """Return the choices in a file, none when there is no file or it is of other sources.

    Raises:
        OSError, ValueError: when it cannot be read, is no such document, or holds rows of another
            GPU, which are not to be written over.
    """
    if not path.exists():
        return {}
    document = gemm_tuning.read_document(path)
    if document["rows"] and document["gpu"] != gpu:
        raise ValueError(
            f"{path}: got rows of {document['gpu']}, expected {gpu}'s: name another file by "
            f"--out, which the ops read if {gemm_tuning.VARIABLE} names it, too"
        )
    return gemm_tuning.read(path, gpu)


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
