"""How GEMM cases are spelt, and which shapes models have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.bench.gemm.cases import (
    DEFAULT_M,
    EDGE_M,
    SHAPE_GROUPS,
    Case,
    Shape,
    cases,
    linear_shapes,
    parse_shapes,
)

SIZE = st.integers(1, 2**31 - 1)


@given(SIZE, SIZE, SIZE)
def test_a_case_is_read_as_it_is_spelt(n: int, k: int, m: int) -> None:
    case = Case(Shape(n, k), m)
    assert str(case) == f"N{n} K{k} M{m}"
    assert Case.parse(str(case)) == case
    assert Shape.parse(f"{n}x{k}") == case.shape == Shape.parse(str(case.shape))


@pytest.mark.parametrize("text", ["", "6144", "x", "6144x", "0x8", "8x0", "-8x8", "8x8x8", "8X8"])
def test_other_spellings_of_a_shape_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NxK such as 6144x4096"):
        Shape.parse(text)


@pytest.mark.parametrize("text", ["", "6144x4096", "N1 K2", "N1 K2 M", "n1 k2 m3", "N1  K2 M3"])
def test_other_spellings_of_a_case_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected one like 'N6144 K4096 M1'"):
        Case.parse(text)


def test_shapes_of_published_models() -> None:
    assert list(map(str, SHAPE_GROUPS["llama-8b"])) == [
        "6144x4096",
        "4096x4096",
        "28672x4096",
        "4096x14336",
    ]
    assert list(map(str, SHAPE_GROUPS["llama-70b-tp8"])) == [
        "1280x8192",
        "8192x1024",
        "7168x8192",
        "8192x3584",
    ]
    assert list(map(str, SHAPE_GROUPS["qwen2.5-7b"])) == [
        "4608x3584",
        "3584x3584",
        "37888x3584",
        "3584x18944",
    ]


def test_ranks_divide_heads_and_intermediate_channels() -> None:
    shapes = linear_shapes(
        hidden_size=64, intermediate_size=96, num_heads=8, num_kv_heads=2, head_dim=16, ranks=2
    )
    assert shapes == [Shape(96, 64), Shape(64, 64), Shape(96, 64), Shape(64, 48)]


def test_shapes_and_groups_are_each_taken_once() -> None:
    found = parse_shapes(["6144x4096", "llama-8b", "8x8"])
    assert found == [*SHAPE_GROUPS["llama-8b"], Shape(8, 8)]
    with pytest.raises(ValueError, match=r"got 'llama', expected NxK .* or one of llama-8b, "):
        parse_shapes(["llama"])


def test_cases_go_through_one_shape_after_the_other() -> None:
    assert list(map(str, cases([Shape(8, 16), Shape(4, 2)], [3, 1, 3]))) == [
        "N8 K16 M1",
        "N8 K16 M3",
        "N4 K2 M1",
        "N4 K2 M3",
    ]
    assert Case(Shape(8, 16), 3).flops == 2 * 3 * 8 * 16


def test_edges_come_after_whole_tiles() -> None:
    assert all(m - 1 in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) for m in EDGE_M)
    assert not set(EDGE_M) & set(DEFAULT_M)
