"""The blocks of experts that are timed, and the spelling of a case."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from ..shapes import SHAPES

DEFAULT_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
ROUTINGS = ("balanced", "skewed", "one")
_CASE = re.compile(r"E(\d+) k(\d+) H(\d+) I(\d+) M(\d+) (balanced|skewed|one)")
_SHAPE = re.compile(r"E(\d+)k(\d+)H(\d+)I(\d+)")


@dataclass(frozen=True, order=True)
class Shape:
    """A block of experts.

    Args:
        experts: how many there are.
        top_k: experts of a token.
        hidden: elements of a token.
        intermediate: of each expert's MLP.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def __post_init__(self) -> None:
        if min(self.top_k, self.hidden, self.intermediate) < 1 or self.experts < self.top_k:
            raise ValueError(f"shape: got {self}, expected sizes of at least 1 and E of at least k")
        if self.hidden < self.experts:
            raise ValueError(f"shape: got {self}, expected H of at least E, by which tokens choose")

    @staticmethod
    def parse(text: str) -> Shape:
        """Return the shape of a model in `SHAPE_NAMES`, or what "E128k8H2048I768" spells.

        Raises:
            ValueError: when the text is neither.
        """
        if text in SHAPE_NAMES:
            return SHAPE_NAMES[text]
        match = _SHAPE.fullmatch(text)
        if match is None:
            names = " or ".join(SHAPE_NAMES)
            raise ValueError(f"got {text!r}, expected {names}, or one like 'E128k8H2048I768'")
        return Shape(*map(int, match.groups()))

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate


def _published(name: str) -> Shape:
    fields: dict[str, Any] = SHAPES[name]
    experts = fields.get("num_experts") or fields["num_local_experts"]
    intermediate = fields.get("moe_intermediate_size", fields["intermediate_size"])
    return Shape(experts, fields["num_experts_per_tok"], fields["hidden_size"], intermediate)


SHAPE_NAMES = {name: _published(name) for name in ("qwen3-30b-a3b", "mixtral-8x7b")}


@dataclass(frozen=True, order=True)
class Case:
    """A block for M tokens.

    Args:
        shape: of the block.
        m: tokens.
        routing: "balanced", all experts in turn; "skewed", the r-th expert 1 / r as often as the
            first; "one", all tokens to the same experts.
    """

    shape: Shape
    m: int
    routing: str

    def __post_init__(self) -> None:
        if self.m < 1 or self.routing not in ROUTINGS:
            raise ValueError(f"case: got {self}, expected M of at least 1 and {ROUTINGS}")

    @staticmethod
    def parse(text: str) -> Case:
        """Return the case that `str` spells so.

        Raises:
            ValueError: when the text spells none.
        """
        match = _CASE.fullmatch(text)
        if match is None:
            example = "E128 k8 H2048 I768 M8 balanced"
            raise ValueError(f"case: got {text!r}, expected one like {example!r}")
        *sizes, m = map(int, match.groups()[:5])
        return Case(Shape(*sizes), m, match.group(6))

    def __str__(self) -> str:
        shape = self.shape
        sizes = f"E{shape.experts} k{shape.top_k} H{shape.hidden} I{shape.intermediate}"
        return f"{sizes} M{self.m} {self.routing}"

    @property
    def flops(self) -> int:
        """Multiplications and additions, those of the router among them."""
        shape = self.shape
        of_token = shape.top_k * shape.expert_weights + shape.experts * shape.hidden
        return 2 * self.m * of_token

    @property
    def distinct(self) -> int:
        """Experts that have tokens, whose weights are read."""
        return int(choices(self).unique().numel())


@cache
def choices(case: Case) -> torch.Tensor:
    """Return the experts of each token, [M, k] int64 on the CPU, the best first; always the same.

    They are to be renumbered at random: what is returned begins with expert 0.
    """
    experts, top_k, m = case.shape.experts, case.shape.top_k, case.m
    if case.routing == "one":
        return torch.arange(top_k).expand(m, top_k)
    if case.routing == "balanced":
        return torch.arange(m * top_k).view(m, top_k) % experts
    generator = torch.Generator().manual_seed(0)
    # The largest of the logarithms of odds and Gumbel noise are a sample without replacement.
    uniform = torch.rand(m, experts, generator=generator).clamp(1e-9, 1 - 1e-9)
    noise = -(-uniform.log()).log()
    odds = -torch.arange(1, experts + 1).float().log()
    return (odds + noise).topk(top_k, dim=1).indices


def cases(shapes: Iterable[Shape], tokens: Iterable[int], routings: Iterable[str]) -> list[Case]:
    """Return all cases of these, in order of their shapes."""
    return [Case(*each) for each in product(shapes, sorted(set(tokens)), routings)]
