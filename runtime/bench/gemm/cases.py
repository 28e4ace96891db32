"""The matrix products that are timed, and the spelling of a case."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from ..shapes import SHAPES

DEFAULT_M = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
# One token more than what a kernel's tile holds.
EDGE_M = (9, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097)
_SPELLING = re.compile(r"(\d+)x(\d+)")
_CASE = re.compile(r"N(\d+) K(\d+) M(\d+)")


@dataclass(frozen=True, order=True)
class Shape:
    """A weight matrix [n, k]: n output channels, k inputs."""

    n: int
    k: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Return the shape of "NxK".

        Raises:
            ValueError: when it is not spelt so, or a size is not positive.
        """
        match = _SPELLING.fullmatch(text)
        n, k = map(int, match.groups()) if match else (0, 0)
        if 0 in (n, k):
            raise ValueError(f"got {text!r}, expected NxK such as 6144x4096")
        return Shape(n, k)

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"


@dataclass(frozen=True, order=True)
class Case:
    """The product of x [m, k] and the transpose of a weight [n, k]."""

    shape: Shape
    m: int

    @staticmethod
    def parse(text: str) -> Case:
        """Return the case that `str` spells so.

        Raises:
            ValueError: when the text spells none.
        """
        match = _CASE.fullmatch(text)
        if match is None:
            raise ValueError(f"case: got {text!r}, expected one like 'N6144 K4096 M1'")
        n, k, m = map(int, match.groups())
        return Case(Shape(n, k), m)

    def __str__(self) -> str:
        return f"N{self.shape.n} K{self.shape.k} M{self.m}"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.shape.n * self.shape.k


def linear_shapes(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ranks: int = 1,
) -> list[Shape]:
    """Return the weights of a decoder layer on one rank: qkv, o, gate_up and down.

    Heads and intermediate channels are divided among the `ranks` GPUs of tensor parallelism; the
    other arguments are those of the model's configuration.
    """
    q, kv = num_heads * head_dim // ranks, num_kv_heads * head_dim // ranks
    intermediate = intermediate_size // ranks
    return [
        Shape(q + 2 * kv, hidden_size),
        Shape(hidden_size, q),
        Shape(2 * intermediate, hidden_size),
        Shape(hidden_size, intermediate),
    ]


def _published(name: str, ranks: int = 1) -> list[Shape]:
    config = SHAPES[name]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return linear_shapes(
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim", hidden // heads),
        ranks=ranks,
    )


SHAPE_GROUPS: dict[str, list[Shape]] = {
    "llama-8b": _published("llama-3.1-8b"),
    "llama-70b": _published("llama-3.1-70b"),
    "llama-70b-tp8": _published("llama-3.1-70b", ranks=8),
    "qwen2.5-7b": _published("qwen2.5-7b"),
    "qwen3-8b": _published("qwen3-8b"),
}
# Of families whose files have FP8 weights in blocks.
BLOCK_SHAPE_GROUPS: dict[str, list[Shape]] = {
    "qwen3.6-27b": [Shape(n, 5120) for n in (16384, 10240, 34816)] + [Shape(5120, 17408)],
    "deepseek-v3": [
        Shape(n, k)
        for n, k in ((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048))
    ],
}
_ALL_GROUPS = {**SHAPE_GROUPS, **BLOCK_SHAPE_GROUPS}


def parse_shapes(texts: Sequence[str]) -> list[Shape]:
    """Return the shapes of these groups and of those spelt NxK, each once, in this order.

    Raises:
        ValueError: for what is neither.
    """
    found: list[Shape] = []
    for text in texts:
        try:
            found += _ALL_GROUPS[text] if text in _ALL_GROUPS else [Shape.parse(text)]
        except ValueError as error:
            raise ValueError(f"{error} or one of {', '.join(_ALL_GROUPS)}") from None
    return list(dict.fromkeys(found))


def cases(shapes: Iterable[Shape], tokens: Iterable[int]) -> list[Case]:
    """Return the cases of all shapes, one shape after the other, m ascending."""
    return [Case(shape, m) for shape, m in product(shapes, sorted(set(tokens)))]
