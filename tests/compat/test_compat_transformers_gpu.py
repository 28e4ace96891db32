"""Accelerated models of transformers on a GPU: compiled steps, graphs, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from ostinato.checkpoint import quantize_checkpoint
from ostinato.compat.transformers import QuantizedLinear, accelerate

transformers.logging.set_verbosity_error()

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=2,
)
PROMPT = list(range(3, 40))
NEW = 24


def accelerated(folder: Path, scheme: str) -> tuple[Any, Any]:
    """Return a model that `accelerate` was given, and one that it was not."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    plain.save_pretrained(folder / "bf16")
    quantize_checkpoint(folder / "bf16", folder / "quantized", scheme=scheme, progress=False)
    models = [
        AutoModelForCausalLM.from_pretrained(folder / "quantized", dtype=torch.bfloat16)
        .cuda()
        .eval()
        for _ in range(2)
    ]
    assert len(accelerate(models[0]).linears) == 14
    return models[0], models[1]


def generated(model: Any, **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT], device="cuda")
    fixed = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    return model.generate(ids, **fixed, **options)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("scheme", ["int8", "int8-asymmetric", "fp8", "fp8-block"])
def test_logits_are_within_the_quantization_error(scheme: str, tmp_path: Path) -> None:
    ours, theirs = accelerated(tmp_path, scheme)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).cuda()
    ids = torch.randint(3, 1000, (2, 64), device="cuda")
    with torch.no_grad():
        got, want, exact = (model(ids).logits.double() for model in (ours, theirs, plain))
    assert (got - want).norm() <= (want - exact).norm()


def check_likely(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Demand that each token is the model's choice, or nearly as likely, after those before it.

    A graph, or another batch, rounds elsewhere, and may choose another of two that are close.
    """
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *tokens]], device="cuda")
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
    chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    assert (logits.amax(1) - chosen <= 0.1 * logits.std(1)).all()


def test_a_static_cache_is_compiled_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is the eager model's, or nearly as likely, and no replay copies a weight."""
    ours, _ = accelerated(tmp_path, "int8")
    expected = generated(ours, cache_implementation="static")
    assert generated(ours, cache_implementation="static") == expected
    check_likely(ours, PROMPT, expected)
    weights = {
        tensor.data_ptr()
        for module in ours.modules()
        if isinstance(module, QuantizedLinear)
        for tensor in module.buffers()
    }
    copied: list[int] = []  # addresses of what torch copies for its graphs before a replay
    copy = torch._foreach_copy_

    def noted(to: Any, of: Any, *options: Any) -> Any:
        copied.extend(tensor.data_ptr() for tensor in of)
        return copy(to, of, *options)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    assert generated(ours, cache_implementation="static") == expected
    assert copied, "there was no replay"
    assert weights.isdisjoint(copied)


def test_batches_are_those_of_single_sequences(tmp_path: Path) -> None:
    """Continuous batching with block tables and transformers' own graphs."""
    ours, _ = accelerated(tmp_path, "int8")
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:20]]
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1)
    sizes = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    results = ours.generate_batch(
        prompts, generation_config=config, continuous_batching_config=sizes, progress_bar=False
    )
    outputs = list(results.values())
    assert [output.error for output in outputs] == [None] * 3
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.generated_tokens) == NEW
        check_likely(ours, prompt, output.generated_tokens)
    assert ours.config._attn_implementation == "ostinato"


def test_batches_begin_when_their_buffers_are_filled(tmp_path: Path) -> None:
    """transformers copies into buffers on another stream than it fills them on."""
    ours, _ = accelerated(tmp_path, "int8")
    manager = ours.init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    )
    for _ in range(2):  # the second is a reset
        torch.cuda._sleep(1_000_000_000)
        manager.batch_processor = manager._create_batch_processor()
        assert torch.cuda.current_stream().query()
