"""Sampling: the generator, the filters, the distribution."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from ops_cases import FLOATS, assert_same_bits

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.sampling.argmax_key import argmax_keys
from ostinato.ops.sampling.philox import philox4x32, uniform

# The known answers that come with Random123 1.14 (file kat_vectors).
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)], device=device) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, expected: str, device: torch.device) -> None:
    got = philox4x32(words(counter, device), words(key, device))
    assert got == words(expected, device)


def test_uniform_is_the_known_answers_top_53_bits(device: torch.device) -> None:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniform(zero, zero).tolist() == [expected]


def test_uniform_uses_all_bits_of_seed_and_counter(device: torch.device) -> None:
    edges = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 12345]
    pairs = [(seed, counter) for seed in edges for counter in edges]
    seeds, counters = (torch.tensor(column, device=device) for column in zip(*pairs, strict=True))
    values = uniform(seeds, counters)
    assert ((values >= 0) & (values < 1)).all()
    assert len(set(values.tolist())) == len(pairs)


def test_uniform_is_uniform(device: torch.device) -> None:
    counters = torch.arange(20000, device=device)
    values = uniform(torch.full_like(counters, 7), counters)
    counts = torch.histc(values.float().cpu(), bins=20, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 45  # 19 degrees of freedom: p = 0.0007


def parameters(batch: int, device: torch.device, **changes: Any) -> dict[str, torch.Tensor]:
    """Return sample's arguments for `batch` rows: temperature 1 and no filter, unless changed."""
    defaults = {
        "temperature": (1.0, torch.float32),
        "top_k": (0, torch.int32),
        "top_p": (1.0, torch.float32),
        "min_p": (0.0, torch.float32),
        "seeds": (0, torch.int64),
    }
    arguments = {
        name: torch.full((batch,), changes.get(name, value), dtype=dtype, device=device)
        for name, (value, dtype) in defaults.items()
    }
    arguments["counters"] = torch.arange(batch, device=device)
    if "repetition_penalty" in changes:
        penalty = torch.full((batch,), changes["repetition_penalty"], device=device)
        arguments |= {"repetition_penalty": penalty, "seen": changes["seen"]}
    return arguments


def draw(probabilities: list[float], device: torch.device, **changes: Any) -> Counter[int]:
    logits = torch.tensor(probabilities, device=device).log().expand(4000, -1)
    return Counter(ops.sample(logits, **parameters(4000, device, **changes)).tolist())


def assert_distribution(counts: Counter[int], probabilities: list[float]) -> None:
    """Chi-square test at p = 0.001, of tokens that are possible; the others must not occur."""
    total, mass, statistic, possible = sum(counts.values()), sum(probabilities), 0.0, 0
    for token, weight in enumerate(probabilities):
        expected = total * weight / mass
        if weight == 0:
            assert counts[token] == 0
            continue
        possible += 1
        statistic += (counts[token] - expected) ** 2 / expected
    critical = {1: 0.0, 2: 10.83, 3: 13.82, 4: 16.27, 5: 18.47}
    assert statistic <= critical[possible]


P = [0.1, 0.4, 0.05, 0.25, 0.2]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, P),
        ({"seeds": -5}, P),
        ({"temperature": 2.0}, [p**0.5 for p in P]),
        ({"temperature": 0.5}, [p**2 for p in P]),
        ({"top_k": 2}, [0, 0.4, 0, 0.25, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 99}, P),
        ({"top_p": 0.6}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.7}, [0, 0.4, 0, 0.25, 0.2]),
        ({"top_p": 0.0}, [0, 1, 0, 0, 0]),
        ({"top_p": 5.0}, P),
        ({"min_p": 0.3}, [0, 0.4, 0, 0.25, 0.2]),
        ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.75}, [0, 0.4, 0, 0.25, 0]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.55}, [0, 0.4, 0, 0.25, 0]),
    ],
    ids=str,
)
def test_distribution(changes: dict[str, Any], kept: list[float], device: torch.device) -> None:
    assert_distribution(draw(P, device, **changes), kept)


def test_impossible_tokens_are_never_drawn(device: torch.device) -> None:
    assert_distribution(draw([0.0, 0.5, 0.0, 0.5], device), [0.0, 0.5, 0.0, 0.5])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_greedy_takes_the_lowest_of_equal_ids(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.tensor(
        [[1, 3, 3, 2], [0, 0, 0, 0], [-5, -7, -6, -5]], dtype=dtype, device=device
    )
    tokens = ops.sample(logits, **parameters(3, device, temperature=0.0))
    assert tokens.tolist() == [1, 0, 0]
    tokens = ops.sample(logits, **parameters(3, device, min_p=1.0, top_k=1))
    assert tokens.tolist() == [1, 0, 0]


def test_min_p_of_one_keeps_ties(device: torch.device) -> None:
    counts = draw([0.4, 0.2, 0.4], device, min_p=1.0)
    assert_distribution(counts, [0.5, 0, 0.5])


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures(temperature: float, device: torch.device) -> None:
    logits = torch.tensor([[1.0, 5.0, -3.0], [2.0, -math.inf, 1.0]], device=device)
    tokens = ops.sample(logits, **parameters(2, device, temperature=temperature))
    if temperature < 1:
        assert tokens.tolist() == [1, 0]
    assert tokens[1] != 1


def test_rows_may_share_what_was_seen(device: torch.device) -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0]], device=device).expand(3, 3)
    seen = torch.tensor([[True, False, False], [False, False, True]], device=device)
    rows = torch.tensor([1, 0, 0], device=device)
    arguments = parameters(3, device, temperature=0.0, repetition_penalty=2.0, seen=seen)
    assert ops.sample(logits, **arguments, seen_rows=rows).tolist() == [0, 1, 1]
    if device.type == "cpu":
        for bad in (-1, 2):
            with pytest.raises(IndexError):
                ops.sample(logits, **arguments, seen_rows=torch.tensor([0, bad, 0]))


NAN_ROWS = [[math.nan] * 4, [0.0, math.nan, 1.0, 2.0], [math.inf, 0.0, 0.0, math.nan]]


def test_a_row_of_no_chances_still_gives_a_token(device: torch.device) -> None:
    logits = torch.full((1, 4), -math.inf, device=device)
    for temperature in (0.0, 1.0):
        arguments = parameters(1, device, temperature=temperature, top_p=0.9, top_k=3)
        assert 0 <= ops.sample(logits, **arguments).item() < 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}], ids=str
)
def test_rows_with_nan_have_no_token(
    filters: dict[str, float], temperature: float, device: torch.device
) -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0, 2.0], *NAN_ROWS], device=device)
    arguments = parameters(4, device, temperature=temperature, **filters)
    seen = torch.tensor([[True, False] * 2] * 4, device=device)
    penalty = torch.full((4,), 1.5, device=device)
    for sample in (ops.sample, reference.sample):
        first, *others = sample(logits, **arguments).tolist()
        assert 0 <= first < 4
        assert others == [-1] * 3
        penalized = sample(logits, **(arguments | {"repetition_penalty": penalty, "seen": seen}))
        assert penalized[1:].tolist() == [-1] * 3


def test_keys_of_nan_have_no_token(device: torch.device) -> None:
    """As an output projection hands them over, which has seen the logits itself."""
    logits = torch.tensor([[0.0, 9.0, 1.0, 2.0], *NAN_ROWS], device=device)
    halves = torch.cat([argmax_keys(logits[:, :2]), argmax_keys(logits[:, 2:]) + 2], dim=1)
    arguments = parameters(4, device, temperature=0.0)
    unread = torch.zeros_like(logits)
    assert ops.sample(unread, **arguments, argmax=halves).tolist() == [1, -1, -1, -1]


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_an_infinite_best_logit_is_drawn(filters: dict[str, float], device: torch.device) -> None:
    inf = math.inf
    logits = torch.tensor([[inf, 0, 1, 2], [0, 5, inf, -inf], [1, inf, inf, 2], [-inf] * 4])
    arguments = parameters(4, device, temperature=1.0, **filters)
    for sample in (ops.sample, reference.sample):
        assert sample(logits.to(device), **arguments).tolist() == [0, 2, 1, 0]


def test_a_logit_that_a_penalty_makes_infinite_is_drawn(device: torch.device) -> None:
    logits = torch.tensor([[3e38, 0.0, 1.0, 2.0]], device=device)
    arguments = parameters(
        1, device, temperature=1.0, repetition_penalty=0.5, seen=torch.ones_like(logits).bool()
    )
    assert ops.sample(logits, **arguments).tolist() == [0]
    assert reference.sample(logits, **arguments).tolist() == [0]


def test_repetition_penalty(device: torch.device) -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0], [-2.0, -1.5, -4.0], [4.0, 3.0, -1.0]], device=device)
    seen = torch.tensor([[True, False, True], [False, True, False], [False] * 3], device=device)
    arguments = parameters(3, device, temperature=0.0, repetition_penalty=2.0, seen=seen)
    assert ops.sample(logits, **arguments).tolist() == [1, 0, 0]
    arguments = parameters(3, device, temperature=0.0, repetition_penalty=1.0, seen=seen)
    assert ops.sample(logits, **arguments).tolist() == [0, 1, 0]


@settings(max_examples=60)
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    batch, vocabulary = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    steps = st.lists(st.integers(-8, 8), min_size=vocabulary, max_size=vocabulary)
    logits = torch.tensor(draw(st.lists(steps, min_size=batch, max_size=batch))) / 2

    def column(strategy: st.SearchStrategy[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(draw(st.lists(strategy, min_size=batch, max_size=batch)), dtype=dtype)

    arguments: dict[str, torch.Tensor] = {
        "temperature": column(st.sampled_from([0.0, 0.3, 1.0, 2.5]), torch.float32),
        "top_k": column(st.integers(0, 40), torch.int64),
        "top_p": column(st.sampled_from([0.0, 0.31, 0.77, 0.93, 1.0]), torch.float32),
        "min_p": column(st.sampled_from([0.0, 0.011, 0.17, 1.0]), torch.float32),
        "seeds": column(st.integers(-(2**63), 2**63 - 1), torch.int64),
        "counters": column(st.integers(0, 2**40), torch.int64),
    }
    if draw(st.booleans()):
        arguments["repetition_penalty"] = column(st.sampled_from([0.7, 1.0, 1.9]), torch.float32)
        arguments["seen"] = torch.rand(batch, vocabulary) < 0.5
    tokens = ops.sample(logits, **arguments)
    assert_same_bits(tokens, reference.sample(logits, **arguments))


def test_large_vocabulary(device: torch.device) -> None:
    logits = torch.randn(3, 50000, device=device)
    arguments = parameters(3, device, top_p=0.95, temperature=0.8)
    assert_same_bits(ops.sample(logits, **arguments), reference.sample(logits, **arguments))


def test_out_and_empty_batches(device: torch.device) -> None:
    out = torch.full((2,), -1, device=device)
    logits = torch.tensor([[0.0, 9.0], [9.0, 0.0]], device=device)
    assert ops.sample(logits, **parameters(2, device, temperature=0.0), out=out) is out
    assert out.tolist() == [1, 0]
    assert ops.sample(logits[:0], **parameters(0, device)).shape == (0,)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"logits": [0.0]}, TypeError, "logits: got list"),
        ({"logits": torch.zeros(2, 3).double()}, TypeError, "logits: got dtype torch.float64"),
        ({"logits": torch.zeros(3)}, ValueError, r"logits: got shape \[3\], expected \[B, V\]"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits: got V = 0"),
        ({"temperature": 1.0}, TypeError, "temperature: got float"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature: got shape"),
        ({"temperature": torch.ones(2).double()}, TypeError, "temperature: got dtype"),
        ({"top_k": torch.ones(2)}, TypeError, "top_k: got dtype torch.float32"),
        ({"top_p": torch.ones(1)}, ValueError, "top_p: got shape"),
        ({"min_p": torch.ones(2).half()}, TypeError, "min_p: got dtype"),
        ({"seeds": torch.ones(2).int()}, TypeError, "seeds: got dtype torch.int32"),
        ({"counters": torch.ones(2).int()}, TypeError, "counters: got dtype torch.int32"),
        ({"seen": torch.ones(2, 3).bool()}, ValueError, "repetition_penalty: got None with seen"),
        ({"repetition_penalty": torch.ones(2)}, ValueError, "seen: got None with repetition_pen"),
        (
            {"repetition_penalty": torch.ones(2), "seen": torch.ones(2, 3)},
            TypeError,
            "seen: got dtype torch.float32",
        ),
        (
            {"repetition_penalty": torch.ones(2), "seen": torch.ones(2, 4).bool()},
            ValueError,
            "seen: got shape",
        ),
        ({"seen_rows": torch.zeros(2).long()}, ValueError, "seen: got None with seen_rows"),
        (
            {
                "repetition_penalty": torch.ones(2),
                "seen": torch.ones(5, 4).bool(),
                "seen_rows": torch.zeros(2).long(),
            },
            ValueError,
            "seen: got shape",
        ),
        (
            {
                "repetition_penalty": torch.ones(2),
                "seen": torch.ones(5, 3).bool(),
                "seen_rows": torch.zeros(2).int(),
            },
            TypeError,
            "seen_rows: got dtype torch.int32",
        ),
        ({"out": torch.zeros(2)}, TypeError, "out: got dtype torch.float32"),
        ({"out": torch.zeros(1).long().expand(2)}, ValueError, "out: got strides"),
        ({"stream": 4}, ValueError, "stream: got 4"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"logits": torch.zeros(2, 3), **parameters(2, torch.device("cpu"))}
    with pytest.raises(error, match=match):
        ops.sample(**{**arguments, **changes})
