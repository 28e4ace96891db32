"""Numbers of rows that a CPU library multiplies alike, and how rows are divided into them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from ostinato.ops.common.alike import ROWS, Alike, cancelling, pieces


@given(
    rows=st.integers(0, 2000),
    alike=st.sets(st.sampled_from(ROWS), min_size=1),
    most=st.sampled_from(ROWS),
)
def test_pieces_cover_all_rows_with_alike_sizes(rows: int, alike: set[int], most: int) -> None:
    found = list(pieces(rows, alike.__contains__, most=most))
    assert [start for start, _, _ in found] == [0, *(stop for _, stop, _ in found)][: len(found)]
    assert (found[-1][1] if found else 0) == rows
    for start, stop, size in found:
        assert size in alike
        assert 0 < stop - start <= size


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, [1]),
        (7, [8]),
        (8, [8]),
        (33, [48]),
        (64, [64]),
        (1000, [512, 512]),
        (260, [256, 4]),
        (2048, [512] * 4),
    ],
)
def test_little_is_padded_and_prompts_stay_whole(rows: int, expected: list[int]) -> None:
    assert [size for _, _, size in pieces(rows, lambda _: True)] == expected


def test_rows_that_come_out_otherwise_are_not_alike() -> None:
    def trial(rows: int) -> torch.Tensor:
        """Let calls of up to 3 rows, and the last of 24, have results of their own."""
        results = torch.ones(rows, 5)
        if rows <= 3:
            results += 1
        if rows == 24:
            results[-1, 2] += 1
        return results

    alike = Alike(trial, (8, 4, 2, 1))
    assert [rows for rows in ROWS[:8] if alike(rows)] == [4, 8, 16, 32, 48]


def test_a_reference_has_rows_that_are_alike() -> None:
    def trial(rows: int) -> torch.Tensor:
        return torch.arange(float(rows)).unsqueeze(1) // 2  # two and two rows are alike

    alike = Alike(trial, (8, 4, 2, 1))
    assert [rows for rows in ROWS if alike(rows)] == [1, 2]


@pytest.mark.parametrize("depth", [1, 7, 64, 576])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_in_another_order_have_other_bits(depth: int, dtype: torch.dtype) -> None:
    x, w = cancelling(depth, 100, dtype)
    assert x.shape == (1, depth)
    assert w.shape == (100, depth)
    products = (x.float() * w.float()).double()
    if depth > 7:
        assert products.sum(1).abs().max() < 1e-6 * products.abs().sum(1).max()
        forward, backward = torch.zeros(100), torch.zeros(100)
        for term in products.float().unbind(1):
            forward += term
        for term in reversed(products.float().unbind(1)):
            backward += term
        assert (forward.to(dtype) != backward.to(dtype)).double().mean() > 0.3
