"""Whole texts of loaded models, through the engine, against those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hf_models import MODELS, TOKENS, random_model, save_plain

from ostinato.checkpoint import load_model
from ostinato.engine import Engine, SamplingParams
from tiny import byte_tokenizer

NEW_TOKENS = 64
PROMPTS = [TOKENS[:1], TOKENS[:5], TOKENS[:23], TOKENS]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_texts_equal_those_of_transformers(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    config = copy.deepcopy(MODELS[name])
    config.get_text_config().max_position_embeddings = 128
    model = random_model(config)
    engine = Engine(
        load_model(save_plain(tmp_path, model), device=device),
        byte_tokenizer(),
        max_batch=len(PROMPTS),
        prefill_chunk=16,
    )
    engine.capture(progress=False)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.token_ids == tuple(expected[0, len(prompt) :].tolist())
    engine.close()
