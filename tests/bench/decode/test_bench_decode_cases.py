"""Cases of decode attention: how they are spelt, and the work in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.bench.decode.cases import Case, cases, parse_heads

SIZES = st.integers(1, 1000)


@given(SIZES, SIZES, SIZES, st.integers(160, 100_000), st.integers(1, 10), SIZES, st.booleans())
def test_a_case_is_parsed_as_it_is_spelt(
    group: int, heads_kv: int, batch: int, kv: int, q_len: int, dim: int, skew: bool
) -> None:
    case = Case(group * heads_kv, heads_kv, batch, kv, q_len, dim, skew)
    assert Case.parse(str(case)) == case
    assert len(case.lengths) == batch
    assert max(case.lengths) == kv


def test_the_published_spelling() -> None:
    assert str(Case(32, 8, 1, 512)) == "32/8 b1 kv512"
    assert str(Case(8, 1, 4, 64, 2, 64, True)) == "8/1 b4 kv64 q2 d64 skew"


@pytest.mark.parametrize(
    "text", ["", "32 b1 kv512", "32/8 b1", "32/8 b0 kv5", "32/5 b1 kv512", "32/8 b1 kv2 q3"]
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="case: got"):
        Case.parse(text)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 6), st.booleans())
def test_work_is_counted_key_by_key(batch: int, kv: int, q_len: int, skew: bool) -> None:
    if q_len > (kv // 16 if skew else kv):
        return
    case = Case(4, 2, batch, kv, q_len, 8, skew)
    seen = sum(
        sum(key <= length - q_len + query for key in range(length))
        for length in case.lengths
        for query in range(q_len)
    )
    assert case.flops == 4 * seen * 4 * 8
    assert case.kv_bytes(2) == 2 * 2 * sum(case.lengths) * 2 * 8


def test_large_caches_and_a_lone_skewed_sequence_are_left_out() -> None:
    found = cases(["8/2"], [1, 4], [64, 1024], skews=(False, True), max_kv_bytes=2 * 2**20)
    names = ["8/2 b1 kv64", "8/2 b1 kv1024", "8/2 b4 kv64", "8/2 b4 kv64 skew"]
    names.append("8/2 b4 kv1024 skew")
    assert [str(case) for case in found] == names


@pytest.mark.parametrize("text", ["8", "8/3", "0/1", "8/0", "a/b"])
def test_heads_that_do_not_divide_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"got '{text}', expected"):
        parse_heads(text)
