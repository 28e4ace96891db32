"""Prompts that share their beginning in the KV cache have the bits of fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ostinato.engine import Engine, SamplingParams


def check_shared_beginnings(engine: Engine, base: list[int], cuts: Sequence[int]) -> None:
    """Check that prompts that share so many tokens with an earlier one get the bits of fresh ones.

    Log-probabilities tell bits of the logits; those of a prompt make that nothing is shared.
    """
    warm = SamplingParams(max_tokens=3, temperature=1.0, seed=4, ignore_eos=True, logprobs=3)
    engine.generate([base], warm)
    for cut in cuts:
        prompt = [*base[:cut], *range(1 + cut % 7, 30)]
        before = engine.cache.shared_tokens
        (shared,) = engine.generate([prompt], warm)
        assert engine.cache.shared_tokens - before == cut
        (fresh,) = engine.generate([prompt], replace(warm, prompt_logprobs=0))
        assert engine.cache.shared_tokens - before == cut
        assert shared.token_ids == fresh.token_ids
        assert shared.logprobs == fresh.logprobs
