"""Sampling by our kernel: the CPU's tokens, whatever the vocabulary, the ties and the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops_cases import FLOATS, assert_same_bits

from ostinato import ops
from ostinato.ops.sampling import sample_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

CUDA = torch.device("cuda")
Columns = dict[str, torch.Tensor]


def columns(batch: int, vocabulary: int) -> Columns:
    """Draw sample's arguments: every third row greedy, filters on and off in all combinations."""
    rows = torch.arange(batch)

    def of(values: list[float], period: int) -> torch.Tensor:
        return torch.tensor(values)[rows // period % len(values)]

    return {
        "temperature": of([0.7, 1.0, 0.0], 1),
        "top_k": of([0, 1, 50, vocabulary // 2, vocabulary + 1], 1).int(),
        "top_p": of([1.0, 0.9, 0.3, 1.0], 2),
        "min_p": of([0.0, 0.05], 3),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch,)),
        "counters": torch.randint(0, 2**40, (batch,)),
    }


def sampled(logits: torch.Tensor, arguments: Columns, **more: Any) -> torch.Tensor:
    """Call the op after seeing that our kernel serves it."""
    assert sample_cuda.serves(logits)
    return ops.sample(logits, **{name: x.to(CUDA) for name, x in arguments.items()}, **more)


def check(logits: torch.Tensor, arguments: Columns) -> None:
    expected = ops.sample(logits.cpu(), **arguments)
    assert_same_bits(sampled(logits.to(CUDA), arguments).cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "vocabulary", [1, 2, 5, 513, 4096, 8191, 32000, 50257, 128256, 151936, 262144]
)
def test_vocabularies_and_dtypes(vocabulary: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(24, vocabulary) * 4).to(dtype)
    check(logits, columns(24, vocabulary))


@pytest.mark.parametrize("batch", [1, 2, 16, 17, 33, 66, 67, 140, 300])
def test_batches_and_shared_rows(batch: int) -> None:
    check(torch.randn(batch, 20000) * 3, columns(batch, 20000))


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-3, 0.1, 30.0, 1e4])
def test_logits_that_are_all_alike_or_far_apart(spread: float) -> None:
    check(3 + spread * torch.randn(24, 50000), columns(24, 50000))


def test_many_ties() -> None:
    check(torch.randint(-3, 4, (60, 70000)).float(), columns(60, 70000))


def test_one_graph_draws_from_what_it_is_given() -> None:
    batch, vocabulary = 9, 30000
    logits = torch.empty(batch, vocabulary, device=CUDA)
    arguments = {name: x.to(CUDA) for name, x in columns(batch, vocabulary).items()}
    out = torch.zeros(batch, dtype=torch.int64, device=CUDA)
    ops.sample(logits, **arguments, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.sample(logits, **arguments, out=out)
    for _ in range(20):
        logits.normal_(std=3)
        for name, x in columns(batch, vocabulary).items():
            arguments[name].copy_(x)
        out.fill_(-1)
        graph.replay()
        given = {name: x.cpu() for name, x in arguments.items()}
        assert_same_bits(out.cpu(), ops.sample(logits.cpu(), **given))


def test_most_tokens_may_be_forbidden() -> None:
    logits = torch.full((24, 128256), -math.inf)
    allowed = torch.randint(128256, (24, 7))
    logits.scatter_(1, allowed, torch.randn(24, 7))
    logits[3] = -math.inf
    logits[3, 77] = 0.5
    check(logits, columns(24, 128256))


def test_a_row_does_not_depend_on_its_batch() -> None:
    arguments = columns(200, 40000)
    logits = torch.randn(200, 40000, device=CUDA)
    whole = sampled(logits, arguments)
    for rows in ([5], [7, 9], list(range(30, 90))):
        some = {name: x[rows] for name, x in arguments.items()}
        assert_same_bits(sampled(logits[rows], some), whole[rows])


@pytest.mark.parametrize("vocabulary", [1000, 128256])
def test_the_penalty_is_for_the_rows_named(vocabulary: int) -> None:
    arguments = columns(24, vocabulary)
    arguments |= {
        "repetition_penalty": torch.tensor([1.0, 1.3, 0.7]).repeat(8),
        "seen": torch.rand(30, vocabulary) < 0.5,
        "seen_rows": torch.randperm(30)[:24],
    }
    check(torch.randn(24, vocabulary) * 2, arguments)
    rows = arguments.pop("seen_rows")
    arguments["seen"] = arguments["seen"][rows]
    check(torch.randn(24, vocabulary) * 2, arguments)


@pytest.mark.parametrize("padding", [3, 4])
def test_rows_may_lie_apart(padding: int) -> None:
    batch, vocabulary = 12, 5000
    arguments = columns(batch, vocabulary)
    logits = torch.randn(batch, vocabulary + padding, device=CUDA)[:, :vocabulary]
    expected = sampled(logits.contiguous(), arguments)
    assert_same_bits(sampled(logits, arguments), expected)


def test_filters_of_no_number_keep_one_token() -> None:
    logits = torch.randn(4, 9000)
    arguments = columns(4, 9000) | {
        "temperature": torch.tensor([math.nan, 1.0, 1.0, 1.0]),
        "top_p": torch.tensor([1.0, math.nan, 1.0, -1.0]),
        "min_p": torch.tensor([0.0, 0.0, math.nan, 0.0]),
    }
    assert sampled(logits.to(CUDA), arguments).tolist() == logits.argmax(1).tolist()


def test_infinite_logits_give_a_token_and_nan_none() -> None:
    logits = torch.randn(6, 9000)
    logits[0] = math.nan
    logits[1] = -math.inf
    logits[2, 5] = math.inf
    logits[3, 5:7] = math.inf
    logits[4, 8] = math.nan
    tokens = sampled(logits.to(CUDA), columns(6, 9000))
    assert tokens[[0, 4]].tolist() == [-1, -1]
    assert tokens[2:4].tolist() == [5, 5]
    assert all(0 <= tokens[row] < 9000 for row in (1, 5))
