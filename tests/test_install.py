"""An editable install finds files that are added later, as the guides of docs/how-to/ expect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ostinato.graphs
import ostinato.models.families
import ostinato.ops

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "folder"),
    [
        (ostinato.graphs, "graphs"),
        (ostinato.models.families, "runtime/models/families"),
        (ostinato.ops, "runtime/ops"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_folders_of_packages_are_those_of_the_repository(module: object, folder: str) -> None:
    file = Path(module.__file__)  # type: ignore[attr-defined]
    assert os.path.samefile(file.parent, ROOT / folder)
