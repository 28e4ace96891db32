"""The document that results are kept in: rows, and what they were measured with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..jit.files import write_whole
from . import machine
from .plot import Dot

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    AnyRow = DataclassInstance | Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        section: the benchmark: "gemm", "decode", "prefill", "graph" or "step".
        case: what was computed, spelt as in the published comparisons.
        impl: which implementation computed it; the names of ours begin with "ostinato_".
        us: microseconds, the median.
        tb_s: terabytes per second of unique bytes read and written.
        tflop_s: 10^12 operations of the algorithm per second.
        peer: of a row of ours, the fastest peer's name in the same case and run.
        ratio: our time over that peer's.
    """

    section: str
    case: str
    impl: str
    us: float
    tb_s: float
    tflop_s: float
    peer: str | None = None
    ratio: float | None = None

    def dots(self) -> list[Dot]:
        """Return the time as the picture of the rows shows it."""
        return [Dot(f"{self.section}, µs", self.case, self.impl, self.us)]

    @staticmethod
    def of(
        section: str, case: str, impl: str, *, seconds: float, num_bytes: float, flops: float
    ) -> Row:
        """Return the row of a measured time and the work done in it."""
        return Row(
            section,
            case,
            impl,
            us=round(seconds * 1e6, 2),
            tb_s=float(f"{num_bytes / seconds / 1e12:.4g}"),
            tflop_s=float(f"{flops / seconds / 1e12:.4g}"),
        )


@dataclass(frozen=True, kw_only=True)
class FloorRow(Row):
    """A `Row` with the shortest time that the GPU allows.

    Args:
        floor_us: the roofline, microseconds; None where the GPU's is not known.
    """

    floor_us: float | None

    @staticmethod
    def with_floor(row: Row, seconds: float | None) -> FloorRow:
        """Return a row with the roofline of what it measures, in seconds."""
        floor_us = None if seconds is None else round(seconds * 1e6, 2)
        return FloorRow(**vars(row), floor_us=floor_us)


@dataclass
class Report:
    """Rows with the GPU (the CPU where none was used), versions and commit they belong to.

    `rows` are of `Row`, or of another dataclass or mappings where it is something else that was
    measured.
    """

    gpu: str
    versions: dict[str, str | None]
    commit: str | None
    rows: list[AnyRow] = field(default_factory=list)

    @staticmethod
    def for_device(device: torch.device) -> Report:
        """Return an empty report for measurements on `device`."""
        versions = machine.versions()
        if device.type != "cuda":
            return Report(machine.cpu_model(), versions, machine.commit())
        driver = next((gpu.driver for gpu in machine.gpus()), None)
        versions |= {"cuda": torch.version.cuda, "driver": driver}
        return Report(torch.cuda.get_device_name(device), versions, machine.commit())

    def to_json(self) -> str:
        """Return the document as JSON, one row per line so that changes of it can be read."""
        head = {name: value for name, value in asdict(self).items() if name != "rows"}
        fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        rows = ",\n".join("  " + json.dumps(_fields(row)) for row in self.rows)
        return "{\n" + "".join(f"{f},\n" for f in fields) + f'"rows": [\n{rows}\n]\n}}\n'

    def write(self, path: Path) -> None:
        """Write the document to a file.

        Raises:
            OSError: when it cannot be written.
        """
        write_whole(path, self.to_json())


def _fields(row: AnyRow) -> dict[str, Any]:
    """Return a row's fields; those of the comparison only where there is a peer."""
    fields = dict(row) if isinstance(row, Mapping) else asdict(row)
    if isinstance(row, Row) and row.peer is None:
        del fields["peer"], fields["ratio"]
    return fields
