"""Greedy texts of a model that is loaded into the engine, and of transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from hf_models import TOKENS, random_model, save_plain
from transformers import PreTrainedConfig

from ostinato.checkpoint import load_model
from ostinato.engine import Engine, SamplingParams
from tiny import byte_tokenizer

NEW_TOKENS = 64
PROMPTS = [TOKENS[:1], TOKENS[:5], TOKENS[:23], TOKENS]


def greedy_texts(
    config: PreTrainedConfig, folder: Path, device: torch.device | str = "cpu"
) -> tuple[list[list[int]], list[list[int]]]:
    """Return what the engine and transformers write after `PROMPTS`.

    Args:
        config: of a random model, which gets positions enough.
        folder: where its checkpoint goes.
        device: of the engine's model.
    """
    config = copy.deepcopy(config)
    config.get_text_config().max_position_embeddings = 128
    model = random_model(config)
    engine = Engine(
        load_model(save_plain(folder, model), device=device),
        byte_tokenizer(),
        max_batch=len(PROMPTS),
        prefill_chunk=16,
    )
    engine.capture(progress=False)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    ours = [list(completion.token_ids) for completion in engine.generate(PROMPTS, params)]
    engine.close()
    theirs = []
    for prompt in PROMPTS:
        whole = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        theirs.append(whole[0, len(prompt) :].tolist())
    return ours, theirs
