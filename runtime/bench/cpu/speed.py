"""Decode steps and prompts of the engine on the CPU, alternately with transformers'."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from ...engine import Engine, SamplingParams
from ..plans import check_least
from ..plot import Dot
from .peer import HuggingFace

Generate = Callable[[Sequence[Sequence[int]], int], object]


@dataclass(frozen=True)
class SpeedPlan:
    """What is timed.

    Args:
        batches: requests at once, for decode steps.
        prompt: tokens of the prompt that is timed alone.
        context: tokens before the decode steps that are timed.
        outputs: tokens of the short and the long text, whose difference is divided by steps.
        repeats: of each, alternately; the fastest counts, since other programs only ever add.
    """

    batches: Sequence[int] = (1, 8)
    prompt: int = 1000
    context: int = 37
    outputs: tuple[int, int] = (2, 18)
    repeats: int = 5

    def check(self) -> None:
        """Refuse numbers that are too small.

        Raises:
            ValueError: naming one of them.
        """
        least = [("batch", batch, 1) for batch in self.batches]
        check_least([*least, ("prompt", self.prompt, 1), ("repeats", self.repeats, 1)])


@dataclass(frozen=True)
class SpeedRow:
    """A time of ours and of transformers, in microseconds, the fastest of `repeats`.

    Attributes:
        case: "b8 decode" or "prompt1000".
        impl, peer: "ostinato_" and "transformers_" with the dtype.
        ratio: `us` over `peer_us`.
        threads: of torch.
    """

    case: str
    impl: str
    us: float
    peer: str
    peer_us: float
    ratio: float
    threads: int
    repeats: int
    section: str = "cpu"

    def dots(self) -> list[Dot]:
        """Return both times as the picture of the rows shows them."""
        times = {self.impl: self.us, self.peer: self.peer_us}
        return [Dot("µs", self.case, name, us) for name, us in times.items()]


def time_beside(
    engine: Engine, peer: HuggingFace, plan: SpeedPlan, dtypes: tuple[str, str]
) -> Iterator[SpeedRow]:
    """Yield the rows of a captured engine and of transformers.

    `dtypes` are the names of theirs. Every prompt is of random tokens and another one, so that no
    prefix is shared.
    """
    vocabulary = engine.model.config.vocab_size
    numbers = random.Random(0)

    def ours(prompts: Sequence[Sequence[int]], tokens: int) -> object:
        return engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))

    def fastest(batch: int, length: int, outputs: Sequence[int]) -> dict[tuple[int, int], float]:
        """Return seconds by implementation and length of the text."""
        seconds: dict[tuple[int, int], float] = {}
        for repeat in range(plan.repeats + 1):
            for tokens in outputs:
                for who, generate in enumerate((ours, peer.generate)):
                    prompts = [
                        [numbers.randrange(vocabulary) for _ in range(length)] for _ in range(batch)
                    ]
                    began = perf_counter()
                    generate(prompts, tokens)
                    took = perf_counter() - began
                    if repeat > 0:  # the first one warms up
                        seconds[who, tokens] = min(took, seconds.get((who, tokens), took))
        return seconds

    def row(case: str, own: float, others: float) -> SpeedRow:
        return SpeedRow(
            case,
            f"ostinato_{dtypes[0]}",
            round(own * 1e6, 1),
            f"transformers_{dtypes[1]}",
            round(others * 1e6, 1),
            round(own / others, 3),
            torch.get_num_threads(),
            plan.repeats,
        )

    short, long = plan.outputs
    for batch in plan.batches:
        found = fastest(batch, plan.context, plan.outputs)
        own, others = ((found[who, long] - found[who, short]) / (long - short) for who in (0, 1))
        yield row(f"b{batch} decode", own, others)
    found = fastest(1, plan.prompt, (1,))
    yield row(f"prompt{plan.prompt}", found[0, 1], found[1, 1])
