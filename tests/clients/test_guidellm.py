"""guidellm, a public load generator, runs against the server and measures it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from server_process import KEY, TINY_LLAMA

pytestmark = pytest.mark.clients

REQUESTS = 40
OUTPUT_TOKENS = 16


def test_guidellm_completes_its_benchmark(url: str, programs: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(str(programs / "guidellm"), "benchmark", "--target", url, "--model", "tiny"),
            *("--processor", str(TINY_LLAMA), "--rate-type", "poisson", "--rate", "10"),
            *("--data", f"prompt_tokens=48,output_tokens={OUTPUT_TOKENS}"),
            *("--max-requests", str(REQUESTS), "--output-path", str(file)),
        ],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "GUIDELLM__OPENAI__API_KEY": KEY,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
    assert benchmark["request_totals"]["successful"] == REQUESTS
    assert benchmark["request_totals"]["errored"] == 0
