"""transformers' model of a checkpoint folder, which generates greedily on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class HuggingFace:
    """A causal language model of transformers, as `from_pretrained` makes it.

    Args:
        folder: of the checkpoint.
        dtype: of weights and activations.

    Raises:
        ImportError: when transformers is not installed.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Return `max_tokens` greedy tokens for each of the prompts, which have one length."""
        found = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        steps = [found.logits[:, -1].argmax(-1)]
        while len(steps) < max_tokens:
            found = self._model(
                steps[-1].unsqueeze(1), past_key_values=found.past_key_values, use_cache=True
            )
            steps.append(found.logits[:, -1].argmax(-1))
        tokens: list[list[int]] = torch.stack(steps, dim=1).tolist()
        return tokens


def chat_prompts(folder: Path, questions: Sequence[str]) -> list[list[int]]:
    """Return the tokens of questions in the model's chat template, up to the answer."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
