"""A NaN within a layer of a static INT8 checkpoint ends the text: no code of INT8 hides it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, random_model
from quantized_files import FORMATS, write_quantized

from ostinato.checkpoint import load_model
from ostinato.engine import Engine, FinishReason, SamplingParams
from tiny import byte_tokenizer

# Tensors of a layer whose NaN reaches the logits through a quantised activation alone: what the
# residual stream holds would show it in any case.
BREAKS: dict[str, Callable[[Any], torch.Tensor]] = {
    "input of qkv": lambda layer: layer.input_norm.weight,
    "input of o": lambda layer: layer.qkv.weight_scale,
    "input of gate_up": lambda layer: layer.post_attention_norm.weight,
    "input of down": lambda layer: layer.gate_up.weight_scale,
}
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("where", BREAKS)
@pytest.mark.parametrize("form", ["ct-int8-static", "ct-int8-asymmetric", "ct-fp8-static"])
def test_nan_in_a_static_activation_ends_the_text(
    form: str, where: str, device: torch.device, tmp_path: Path
) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama"]), FORMATS[form])
    model = load_model(tmp_path, device=device)
    engine = Engine(model, byte_tokenizer(), max_batch=2, page_size=4, prefill_chunk=8)
    engine.capture(progress=False)
    prompts = [[3, 1, 4], [1, 5]]
    before = engine.generate(prompts, PARAMS)
    assert [len(found.token_ids) for found in before] == [4, 4]
    tensor = BREAKS[where](model.layers[0])
    number = tensor[-1].clone()
    tensor[-1] = torch.nan
    for found in engine.generate(prompts, PARAMS):
        assert found.finish_reason is FinishReason.ERROR
        assert found.token_ids == ()
    assert engine.stats.failed_requests == 2
    tensor[-1] = number
    after = engine.generate(prompts, PARAMS)
    assert [found.token_ids for found in after] == [found.token_ids for found in before]
