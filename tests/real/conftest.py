"""Checkpoints of real models, and the writer of what was measured with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_models import (
    CALIBRATION,
    MODELS,
    RealModel,
    Record,
    RegistryUnreachableError,
    topics_text,
)

from ostinato.bench.machine import package_versions
from ostinato.bench.report import Report
from ostinato.checkpoint import quantize_checkpoint


@pytest.fixture(params=MODELS, ids=lambda model: model.name, scope="session")
def real(request: pytest.FixtureRequest) -> RealModel:
    """Give each model, whose folder is there; without it the tests of the model fail."""
    model: RealModel = request.param
    try:
        model.folder()
    except RegistryUnreachableError as error:
        pytest.fail(str(error), pytrace=False)
    return model


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RealModel, str], Path]:
    """Give a function of a model and "bf16" or a scheme, "-calibrated" or not: its folder."""
    found: dict[tuple[str, str], Path] = {}

    def folder(model: RealModel, scheme: str) -> Path:
        if scheme == "bf16":
            return model.folder()
        key = (model.name, scheme)
        if key not in found:
            target = tmp_path_factory.mktemp(model.name) / scheme
            kind, calibrated, _ = scheme.partition("-calibrated")
            text = target.with_name("text.txt") if calibrated else None
            if text is not None:
                text.write_text(topics_text(CALIBRATION), encoding="utf-8")
            quantize_checkpoint(model.folder(), target, scheme=kind, calibrate=text, progress=False)
            found[key] = target
        return found[key]

    return folder


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    """Take what was measured, on one device; `OSTINATO_REAL_RESULTS` names the file for it."""
    reports: dict[str, Report] = {}

    def add(device: torch.device, model: RealModel, **row: Any) -> None:
        report = reports.setdefault(device.type, Report.for_device(device))
        report.rows.append({"model": model.name, **row})

    yield add
    file = os.environ.get("OSTINATO_REAL_RESULTS")
    if not file or not reports:
        return
    if len(reports) > 1:
        raise RuntimeError("OSTINATO_REAL_RESULTS: got rows of CPU and GPU, expected one device")
    (report,) = reports.values()
    report.versions |= package_versions("transformers")
    report.write(Path(file))
