"""The example of a chat, with the model that it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_models import MODELS, ROOT, RealModel

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("real", MODELS[:1], ids=lambda model: model.name, indirect=True)
def test_the_chat_names_paris(real: RealModel, tmp_path: Path) -> None:
    (tmp_path / "bf16").symlink_to(real.folder())
    command = [sys.executable, ROOT / "examples" / "chat_smollm2.py", "--folder", tmp_path]
    done = subprocess.run(
        [*command, "--message", "What is the capital of France?"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())},
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
