"""The model of the tensor cores' sums, where it can be said by hand."""

from __future__ import annotations

import pytest
import torch
from fp8_sums import tensor_core_dots

E4M3 = torch.float8_e4m3fn


def dot(left: list[float], right: list[float]) -> float:
    rows = torch.zeros(2, 1, 64)
    rows[0, 0, : len(left)] = torch.tensor(left)
    rows[1, 0, : len(right)] = torch.tensor(right)
    return tensor_core_dots(*rows.to(E4M3)).item()


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.5, 3.0], [2.0, -0.5], 1.5),
        # 2^-13 beside 1 is kept, what is less is not, whatever the order.
        ([1.0, 2.0**-6], [1.0, 2.0**-7], 1 + 2.0**-13),
        ([1.0, 2.0**-7], [1.0, 2.0**-7], 1.0),
        ([2.0**-7, 1.0], [2.0**-7, 1.0], 1.0),
        # Towards zero: of -1.75 · 2^-13 one 2^-13 is left.
        ([1.0, -1.75 * 2.0**-6], [1.0, 2.0**-7], 1 - 2.0**-13),
        # 1.5 · 1.5 is 2.25, but has the exponent of 1.
        ([1.5, 2.0**-6], [1.5, 2.0**-7], 2.25),
        ([1.5, 1.0, -1.0, 2.0**-6], [1.5, 1.0, 1.0, 2.0**-6], 2.25 + 2.0**-12),
        ([0.0], [0.0], 0.0),
    ],
)
def test_bits_below_the_greatest_term_are_cut_off(
    left: list[float], right: list[float], expected: float
) -> None:
    assert dot(left, right) == expected


def test_a_later_step_is_cut_off_beside_the_sum_so_far() -> None:
    tail = [0.0] * 31
    assert dot([16.0, *tail, 2.0**-5], [16.0, *tail, 1.0]) == 256 + 2.0**-5
    assert dot([16.0, *tail, 2.0**-6], [16.0, *tail, 1.0]) == 256
    assert dot([2.0**-6, *tail, 16.0], [1.0, *tail, 16.0]) == 256


def test_long_random_sums_are_off_by_little() -> None:
    torch.manual_seed(0)
    left, right = (24 * torch.randn(50, 256)).to(E4M3), (24 * torch.randn(40, 256)).to(E4M3)
    exact = left.double() @ right.double().T
    off = (tensor_core_dots(left, right) - exact).square().mean().sqrt()
    assert 1e-5 < off / exact.square().mean().sqrt() < 1e-3
