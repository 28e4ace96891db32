"""How long greedy answers in 16 bits follow those in fp32, ours beside transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ...engine import Engine, SamplingParams
from ..plot import Dot
from .peer import HuggingFace


@dataclass(frozen=True)
class AgreementRow:
    """Mean length of the common prefix of answers and those of transformers in fp32.

    Attributes:
        case: number of prompts and of tokens of each answer.
        impl: whose answers.
        mean: tokens.
        lengths: of each prompt.
        ratio: of ours, the mean over that of transformers in the same dtype.
    """

    case: str
    impl: str
    mean: float
    lengths: list[int]
    ratio: float | None = None
    section: str = "agreement"

    def dots(self) -> list[Dot]:
        """Return the mean as the picture of the rows shows it."""
        return [Dot("common prefix, tokens", self.case, self.impl, self.mean)]


def engine_answers(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Return so many greedy tokens of a captured engine for each prompt."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [list(answer.token_ids) for answer in engine.generate(list(prompts), params)]


def peer_answers(peer: HuggingFace, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Return so many greedy tokens of transformers for each prompt, which it serves one by one."""
    return [peer.generate([prompt], tokens)[0] for prompt in prompts]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def agreement(
    impl: str,
    answers: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    peer: AgreementRow | None = None,
) -> AgreementRow:
    """Return the row of answers beside those expected; `peer` is what its ratio is to."""
    lengths = [common_prefix(a, b) for a, b in zip(answers, expected, strict=True)]
    mean = sum(lengths) / len(lengths)
    ratio = None if peer is None else round(mean / peer.mean, 3)
    case = f"{len(expected)} prompts, {len(expected[0])} tokens"
    return AgreementRow(case, impl, round(mean, 2), lengths, ratio)
