"""The embedding: rows of the table and marks of what was seen, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_cases import FLOATS, assert_same_bits

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")


def table_of(
    vocabulary: int, dim: int, dtype: torch.dtype, device: torch.device, apart: int = 0
) -> torch.Tensor:
    """Return rows that lie `apart`, NaN between them."""
    storage = torch.full((vocabulary, dim + apart), torch.nan)
    storage[:, :dim] = torch.randn(vocabulary, dim)
    return storage.to(dtype).to(device)[:, :dim]


def poisoned(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for an output, between rows of which others are to stay."""
    return torch.full((rows, 2, dim), 77, dtype=dtype, device=device)


def expected_rows(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return reference.embed(tokens, table, dtype=table.dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8, 20, 64, 250, 256, 1000, 2056, 4096])
@pytest.mark.parametrize("count", [1, 2, 37])
def test_rows_are_the_tables(
    count: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    for apart in (0, 3, 8):
        table = table_of(50, dim, dtype, device, apart)
        tokens = torch.randint(50, (count,)).to(device)
        around = poisoned(count, dim, dtype, device)
        out = around[:, 1]
        assert ops.embed(tokens, table, out=out) is out
        assert_same_bits(out, expected_rows(tokens, table))
        assert_same_bits(ops.embed(tokens, table), out)
        assert (around[:, 0] == 77).all()


def test_every_bit_of_a_row_is_kept(device: torch.device) -> None:
    bits = torch.arange(-(2**15), 2**15).short().view(64, 1024).to(device)
    for dtype in (torch.bfloat16, torch.float16):
        tokens = torch.randperm(64).to(device)
        assert_same_bits(ops.embed(tokens, bits.view(dtype)), bits[tokens].view(dtype))


def test_no_tokens(device: torch.device) -> None:
    table = table_of(5, 16, torch.bfloat16, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    seen = torch.zeros(2, 5, dtype=torch.bool, device=device)
    assert ops.embed(none, table, seen=seen, seen_rows=none).shape == (0, 16)
    assert not seen.any()


@pytest.mark.parametrize("apart", [0, 5])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_tokens_are_marked_as_seen(count: int, apart: int, device: torch.device) -> None:
    vocabulary, sets = 90, 9
    table = table_of(vocabulary, 24, torch.bfloat16, device)
    storage = torch.rand(sets, vocabulary + apart).lt(0.2).to(device)
    before = storage.clone()
    seen = storage[:, :vocabulary]
    # Of 300 tokens some are the same in one set, and some in several.
    tokens, rows = torch.randint(40, (count,)).to(device), torch.randint(sets, (count,)).to(device)
    want = seen.clone()
    wanted = reference.embed(tokens, table, seen=want, seen_rows=rows, dtype=table.dtype)
    for _ in range(2):  # marking again changes nothing
        assert_same_bits(ops.embed(tokens, table, seen=seen, seen_rows=rows), wanted)
        assert torch.equal(seen, want)
    assert torch.equal(storage[:, vocabulary:], before[:, vocabulary:])


def test_one_token_in_one_set_many_times(device: torch.device) -> None:
    table = table_of(30, 8, torch.float32, device)
    seen = torch.zeros(3, 30, dtype=torch.bool, device=device)
    tokens, rows = (torch.full((200,), i, device=device) for i in (29, 2))
    ops.embed(tokens, table, seen=seen, seen_rows=rows)
    assert seen.nonzero().tolist() == [[2, 29]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [8, 61, 2056])
def test_tables_of_ranks_add_up_to_the_whole(
    dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    whole = table_of(50, dim, dtype, device)
    tokens = torch.tensor([0, 18, 19, 37, 38, 49, 7, -1], device=device)
    rows = torch.arange(len(tokens), device=device)
    total = torch.zeros(len(tokens), dim, dtype=dtype, device=device)
    marks = []
    for first in (0, 19, 38):  # the last of which has fewer rows than the others
        seen = torch.zeros(len(tokens), 50, dtype=torch.bool, device=device)
        marked = {"seen": seen, "seen_rows": rows}
        table = whole[first : first + 19]
        part = ops.embed(tokens, table, first_id=first, vocabulary=50, **marked)
        held = ((tokens >= first) & (tokens < first + 19)) | ((tokens < 0) & (first == 38))
        assert not part[~held].any()
        total += part
        marks.append(seen)
    assert_same_bits(total, whole[tokens])
    assert all(torch.equal(seen, marks[0]) for seen in marks)
    assert torch.equal(marks[0].nonzero()[:, 1], tokens % 50)


def test_rows_before_the_padding_are_as_ever(device: torch.device) -> None:
    table = table_of(30, 40, torch.float16, device)
    tokens, rows = torch.arange(9, device=device), torch.arange(9, device=device)
    for real in (9, 4, 1, 12):
        n_active = torch.tensor([real], dtype=torch.int32, device=device)
        seen = torch.zeros(9, 30, dtype=torch.bool, device=device)
        out = ops.embed(tokens, table, seen=seen, seen_rows=rows, n_active=n_active)
        assert_same_bits(out[:real], table[:9][:real])
        assert torch.equal(seen[:real, :9], torch.eye(9, device=device).bool()[:real])


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("tokens", 30, "tokens: got 30 for token 1, expected -1 to 29"),
        ("tokens", -2, "tokens: got -2 for token 1, expected -1 to 29"),
        ("seen_rows", 3, "seen_rows: got 3 for token 1, expected 0 to 2"),
        ("seen_rows", -(2**63), "seen_rows: got -9223372036854775808 for token 1"),
    ],
)
def test_ids_out_of_range_are_named(
    name: str, value: int, match: str, device: torch.device
) -> None:
    arguments = {
        "tokens": torch.zeros(3, dtype=torch.int64, device=device),
        "seen_rows": torch.zeros(3, dtype=torch.int64, device=device),
        "seen": torch.zeros(3, 30, dtype=torch.bool, device=device),
        "out": torch.full((3, 8), 77.0, device=device),
    }
    arguments[name][1] = value
    table = table_of(30, 8, torch.float32, device)
    for check_bounds in (True, False) if device.type == "cpu" else (True,):
        with pytest.raises(ValueError, match=match):
            ops.embed(**arguments, table=table, check_bounds=check_bounds)
    assert not arguments["seen"].any()
    assert (arguments["out"] == 77).all()


INTS = torch.zeros(4, dtype=torch.int64)
MASK = torch.zeros(2, 6, dtype=torch.bool)
TABLE = torch.zeros(6, 8)
BAD = [
    ({"tokens": INTS.int()}, TypeError, "tokens: got dtype torch.int32, expected torch.int64"),
    ({"tokens": [1, 2]}, TypeError, "tokens: got list, expected a tensor"),
    ({"tokens": INTS.view(2, 2)}, ValueError, r"tokens: got shape \[2, 2\], expected \[T\]"),
    ({"tokens": torch.zeros(8, dtype=torch.int64)[::2]}, ValueError, "tokens: got strides"),
    ({"table": TABLE.double()}, TypeError, "table: got dtype torch.float64, expected"),
    ({"table": TABLE[0]}, ValueError, r"table: got shape \[8\], expected \[V, H\]"),
    ({"table": torch.zeros(8, 6).t()}, ValueError, "table: got strides"),
    ({"table": TABLE[:, :0]}, ValueError, "table: got H = 0, expected at least 1"),
    ({"table": TABLE[:0]}, ValueError, "table: got V = 0, expected at least 1"),
    ({"table": torch.zeros(1, 1).expand(6, 2**31)}, ValueError, "table: got"),
    ({"seen": None}, ValueError, "seen: got None with seen_rows, expected both or neither"),
    ({"seen_rows": None}, ValueError, "seen_rows: got None with seen, expected both or neither"),
    ({"seen": MASK.byte()}, TypeError, "seen: got dtype torch.uint8, expected torch.bool"),
    ({"seen": MASK[:, :5]}, ValueError, r"seen: got shape \[2, 5\], expected \[S, 6\]"),
    ({"seen": MASK[:0]}, ValueError, "seen: got S = 0, expected at least 1"),
    ({"seen": MASK[:1].expand(2, 6)}, ValueError, "seen: got strides"),
    ({"seen_rows": INTS[:3]}, ValueError, r"seen_rows: got shape \[3\], expected \[4\]"),
    ({"seen_rows": INTS.int()}, TypeError, "seen_rows: got dtype torch.int32"),
    ({"n_active": 4}, TypeError, "n_active: got int, expected a tensor"),
    ({"n_active": INTS[:1]}, TypeError, "n_active: got dtype torch.int64"),
    ({"n_active": INTS.int()}, ValueError, r"n_active: got shape \[4\], expected \[1\]"),
    ({"out": torch.zeros(4, 8).half()}, TypeError, "out: got dtype torch.float16"),
    ({"out": torch.zeros(3, 8)}, ValueError, r"out: got shape \[3, 8\], expected \[4, 8\]"),
    ({"out": torch.zeros(1, 8).expand(4, 8)}, ValueError, "out: got strides"),
    ({"first_id": 2}, ValueError, "first_id: got 2, expected 0 without a vocabulary"),
    ({"first_id": -1, "vocabulary": 9}, ValueError, "first_id: got -1, expected at least 0"),
    ({"first_id": 2, "vocabulary": 7}, ValueError, "vocabulary: got 7, expected at least 8"),
    ({"vocabulary": 9}, ValueError, r"seen: got shape \[2, 6\], expected \[S, 9\]"),
    ({"check_bounds": 1}, TypeError, "check_bounds: got int, expected a bool"),
    ({"stream": 0}, ValueError, "stream: got 0, expected None"),
]


@pytest.mark.parametrize(("changes", "error", "match"), BAD, ids=[row[2] for row in BAD])
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"tokens": INTS, "table": TABLE, "seen": MASK, "seen_rows": INTS, **changes}
    with pytest.raises(error, match=match):
        ops.embed(**arguments)
    assert not MASK.any()
