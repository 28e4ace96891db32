"""Log-probabilities against the reference: ties, edges, rows that want none."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from ops_cases import assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")


def check(logits: torch.Tensor, tokens: list[int], wanted: list[int], most: int) -> None:
    """Demand the reference's tokens, and its numbers to fp32's rounding."""
    device = logits.device
    arguments: dict[str, Any] = {
        "wanted": int32(wanted, device),
        "slots": torch.arange(len(wanted), device=device),
        "most": most,
    }
    chosen = torch.tensor(tokens, device=device)
    before = logits.clone()
    values, ids = ops.token_logprobs(logits, chosen, **arguments)
    exact = reference.token_logprobs(logits, chosen, **arguments, dtype=torch.float64)
    assert_same_bits(ids, exact.ids)
    assert values.shape == (len(logits), 1 + most)
    torch.testing.assert_close(values.double(), exact.values, rtol=3e-6, atol=3e-6, equal_nan=True)
    assert_same_bits(logits, before)


@pytest.mark.parametrize("vocabulary", [1, 2, 19, 511, 513, 5000, 50257])
@pytest.mark.parametrize("deviation", [0.1, 8.0])
def test_equals_the_reference(vocabulary: int, deviation: float, device: torch.device) -> None:
    logits = deviation * torch.randn(5, vocabulary)
    tokens = torch.randint(vocabulary, (5,)).tolist()
    check(logits.to(device), tokens, [20, 0, -1, 3, 1], 20)


@settings(max_examples=40)
@given(st.data())
def test_ties_and_odd_logits(data: st.DataObject) -> None:
    draw = data.draw
    batch, vocabulary, most = (draw(st.integers(*e)) for e in ((1, 3), (1, 12), (0, 14)))
    odd = st.sampled_from([0.0, -0.0, 1.0, 1.5, -7.0, -math.inf, math.nan, 80.0])
    row = st.lists(odd, min_size=vocabulary, max_size=vocabulary)
    logits = torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))
    tokens = draw(st.lists(st.integers(-1, vocabulary), min_size=batch, max_size=batch))
    wanted = draw(st.lists(st.integers(-1, most), min_size=batch, max_size=batch))
    check(logits, tokens, wanted, most)


def test_equal_logits_come_by_rising_id(device: torch.device) -> None:
    values, ids = ops.token_logprobs(
        torch.zeros(1, 3000, device=device),
        torch.tensor([2999], device=device),
        wanted=int32([20], device),
        slots=torch.zeros(1, dtype=torch.int64, device=device),
        most=20,
    )
    assert ids.tolist() == [list(range(20))]
    torch.testing.assert_close(values, torch.full_like(values, -math.log(3000)))


def test_best_tokens_of_one_stripe(device: torch.device) -> None:
    """More candidates than the kernel keeps: all of a row's best belong to few of its threads."""
    logits = torch.zeros(1, 512 * 300, device=device)
    logits[0, 5::512] = 1 + torch.arange(300, device=device) / 300
    logits[0, 6::512] = 1 + torch.arange(300, device=device) / 299
    check(logits, [6], [20], 20)


def test_infinite_best_logits_have_no_numbers(device: torch.device) -> None:
    logits = torch.tensor([[0.0, math.inf], [-math.inf, -math.inf]], device=device)
    values, ids = ops.token_logprobs(
        logits,
        torch.zeros(2, dtype=torch.int64, device=device),
        wanted=int32([1], device),
        slots=torch.zeros(2, dtype=torch.int64, device=device),
        most=1,
    )
    assert values[:, 1].isnan().all()
    assert ids.tolist() == [[1], [0]]


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    logits = torch.randn(6, 5000, device=device)
    tokens = torch.arange(6, device=device)
    wanted, slots = int32([4, -1], device), torch.tensor([0, 1, 0, 0, 1, 0], device=device)
    whole = ops.token_logprobs(logits, tokens, wanted=wanted, slots=slots, most=5)
    for row in range(6):
        alone = ops.token_logprobs(
            logits[row : row + 1],
            tokens[row : row + 1],
            wanted=wanted,
            slots=slots[row : row + 1],
            most=5,
        )
        assert_same_bits(alone.values[0], whole.values[row])
        assert_same_bits(alone.ids[0], whole.ids[row])


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"logits": torch.zeros(2, 4).bfloat16()}, TypeError, "logits: got dtype torch.bfloat16"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits: got V = 0"),
        ({"tokens": torch.zeros(2).int()}, TypeError, "tokens: got dtype torch.int32"),
        ({"wanted": torch.zeros(2).long()}, TypeError, "wanted: got dtype torch.int64"),
        ({"slots": torch.zeros(3).long()}, ValueError, "slots: got shape"),
        ({"most": -1}, ValueError, "most: got -1"),
        ({"stream": 4}, ValueError, "stream: got 4"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 4),
        "tokens": torch.zeros(2).long(),
        "wanted": torch.zeros(2).int(),
        "slots": torch.zeros(2).long(),
        "most": 2,
    }
    with pytest.raises(error, match=match):
        ops.token_logprobs(**{**arguments, **changes})
