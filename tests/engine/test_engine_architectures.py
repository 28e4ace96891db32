"""The engine on GPUs of other architectures, which the one at hand stands in for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ostinato.engine import Engine, SamplingParams
from ostinato.jit.targets import VARIABLE
from ostinato.models import sequence_logits
from ostinato.ops.implementations import implementations_on
from tiny import byte_tokenizer, tiny_llama

TOKENIZER = byte_tokenizer()
_HERE = Path(__file__).parent
# Modules with tests on a GPU; this one would start itself again.
_MODULES = [
    path.name
    for path in sorted(_HERE.glob("test_*.py"))
    if path != Path(__file__)
    and any(word in path.read_text() for word in ("mark.gpu", "device: torch.device"))
]


@pytest.mark.parametrize("scheme", ["plain", "int8", "fp8"])
def test_16_bit_texts_follow_the_largest_logits(scheme: str, device: torch.device) -> None:
    model = tiny_llama(device, scheme, dtype=torch.bfloat16, head_dim=16)
    engine = Engine(model, TOKENIZER, max_batch=4, page_size=16, prefill_chunk=16)
    report = engine.capture(progress=False)  # replays are verified bit for bit
    assert report.notes == {**implementations_on(device), "KV cache": "bf16"}
    prompts = ["a", "some prompt", "a prompt longer than a chunk of 16"]
    for completion in engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True)):
        prompt = TOKENIZER.encode(prompts[completion.request_id]).ids
        for count, token in enumerate(completion.token_ids):
            logits = sequence_logits(model, [*prompt, *completion.token_ids[:count]])[-1]
            # Roundings to 16 bits on the way differ between a prompt and its tokens one by one.
            assert logits[token] >= logits.max() - 0.1


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", _MODULES)
@pytest.mark.parametrize("capability", ["8.0", "8.9", "12.0"])
def test_the_suite_passes_on_a_stand_in(capability: str, module: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(_HERE / module)],
        capture_output=True,
        text=True,
        cwd=_HERE.parents[1],
        env={**os.environ, VARIABLE: capability},
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("capability", "words"),
    [("7.5", "expected one of a known GPU"), ("8", "expected a capability such as 8.0")],
)
def test_an_engine_refuses_what_a_gpu_can_not_be(capability: str, words: str) -> None:
    program = "import torch; from ostinato.ops.implementations import *; "
    program += "implementations_on(torch.device('cuda'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, VARIABLE: capability},
        timeout=120,
    )
    assert done.returncode != 0
    assert f"{VARIABLE}: got '{capability}'" in done.stderr or f"got {capability}," in done.stderr
    assert words in done.stderr
