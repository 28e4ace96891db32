"""Whole texts of loaded models, through the engine, against those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from greedy_texts import NEW_TOKENS, PROMPTS, greedy_texts
from hf_models import MODELS

from effort import on_devices


@pytest.mark.parametrize(
    ("device", "name"),
    on_devices(((name,) for name in list(MODELS)[::6]), ((name,) for name in MODELS)),
    indirect=["device"],
)
def test_greedy_texts_equal_those_of_transformers(
    device: torch.device, name: str, tmp_path: Path
) -> None:
    ours, theirs = greedy_texts(MODELS[name], tmp_path, device)
    assert [len(text) for text in ours] == [NEW_TOKENS] * len(PROMPTS)
    assert ours == theirs
