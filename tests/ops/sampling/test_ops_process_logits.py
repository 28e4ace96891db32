"""Processing logits against the reference, and what it leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from ops_cases import assert_close, assert_same_bits

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")
Columns = dict[str, torch.Tensor]


def tables_of(
    slots: int, vocabulary: int, generator: torch.Generator, history: int = 9, edits: int = 5
) -> ops.LogitsTables:
    """Return tables that ask for everything, with ids that are different in each slot's edits."""

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    some = min(edits, vocabulary)
    ids = torch.stack(
        [torch.randperm(vocabulary, generator=generator)[:some] for _ in range(slots)]
    )
    values = torch.randn(slots, edits, generator=generator) * 3
    values[:, 0] = -math.inf
    return ops.LogitsTables(
        frequency=torch.randn(slots, generator=generator),
        presence=torch.randn(slots, generator=generator),
        history=integers(0, vocabulary, slots, history),
        edits=integers(0, some + 1, slots),
        edit_ids=torch.nn.functional.pad(ids, (0, edits - some)).int(),
        edit_values=values,
        edit_ends=integers(0, 12, slots, edits).long(),
        masked=integers(0, 2, slots),
        mask=integers(-(2**31), 2**31 - 1, slots, -(-vocabulary // 32)),
    )


def columns_of(
    batch: int, slots: int, vocabulary: int, generator: torch.Generator, history: int = 9
) -> Columns:
    penalties = torch.tensor([1.0, 0.7, 1.9])
    return {
        "slots": torch.randperm(slots, generator=generator)[:batch],
        "counters": torch.randint(0, history + 1, (batch,), generator=generator),
        "tokens": torch.randint(0, vocabulary, (batch,), generator=generator),
        "repetition_penalty": penalties[torch.randint(3, (batch,), generator=generator)],
        "seen": torch.rand(slots, vocabulary, generator=generator) < 0.5,
    }


def on(device: torch.device, tables: ops.LogitsTables) -> ops.LogitsTables:
    return ops.LogitsTables(*(getattr(tables, name).to(device) for name in vars(tables)))


def check(logits: torch.Tensor, tables: ops.LogitsTables, columns: Columns) -> None:
    """Demand the reference's fp32 bits on the CPU, and the CPU's on a GPU."""
    device = logits.device
    before, history = logits.clone(), tables.history.clone()
    expected = reference.process_logits(
        logits.cpu(),
        on(torch.device("cpu"), tables),
        **{name: column.cpu() for name, column in columns.items()},
        dtype=torch.float32,
    )
    first = ops.process_logits(logits, tables, **columns)
    again = ops.process_logits(logits, tables, **columns)  # on the history that the first wrote
    assert_same_bits(first.cpu(), expected)
    assert_same_bits(again, first)
    assert_same_bits(logits, before)
    for row, (slot, counter) in enumerate(
        zip(columns["slots"].tolist(), columns["counters"].tolist(), strict=True)
    ):
        if counter and (tables.frequency[slot] != 0 or tables.presence[slot] != 0):
            history[slot, counter - 1] = columns["tokens"][row]
    assert_same_bits(tables.history, history.to(device))


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 4095, 4097, 9000])
def test_equals_the_reference(vocabulary: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    tables = on(device, tables_of(5, vocabulary, generator))
    columns = columns_of(3, 5, vocabulary, generator)
    logits = 4 * torch.randn(3, vocabulary, generator=generator)
    check(logits.to(device), tables, {name: c.to(device) for name, c in columns.items()})


@settings(max_examples=30)
@given(st.data())
def test_equals_the_reference_of_any_request(data: st.DataObject) -> None:
    draw = data.draw
    batch, spare, vocabulary = (draw(st.integers(*edges)) for edges in ((1, 4), (0, 2), (1, 40)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tables = tables_of(batch + spare, vocabulary, generator)
    off = {
        name: torch.zeros_like(getattr(tables, name))
        for name in ("frequency", "presence", "edits", "masked")
        if draw(st.booleans())
    }
    odd = st.sampled_from([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan, 3e38])
    row = st.lists(odd, min_size=vocabulary, max_size=vocabulary)
    logits = torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))
    check(logits, replace(tables, **off), columns_of(batch, batch + spare, vocabulary, generator))


def test_error_is_within_twice_torchs(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    tables = replace(tables_of(4, 500, generator), masked=torch.zeros(4, dtype=torch.int32))
    tables = on(device, replace(tables, edit_values=tables.edit_values.clamp(min=-9)))
    columns = {name: c.to(device) for name, c in columns_of(4, 4, 500, generator).items()}
    logits = (4 * torch.randn(4, 500, generator=generator)).to(device)
    result = ops.process_logits(logits, tables, **columns)
    assert_close(
        result,
        lambda dtype: reference.process_logits(logits, tables, **columns, dtype=dtype),
        rounded_once=False,
    )


def neutral(device: torch.device, slots: int = 3, vocabulary: int = 4) -> ops.LogitsTables:
    return ops.LogitsTables.neutral(slots, vocabulary, 8, 2, device)


def plain(batch: int, device: torch.device, slots: int = 3, vocabulary: int = 4) -> Columns:
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    return {
        "slots": torch.arange(batch, device=device),
        "counters": zeros + 3,
        "tokens": zeros + 1,
        "repetition_penalty": torch.ones(batch, device=device),
        "seen": torch.ones(slots, vocabulary, dtype=torch.bool, device=device),
    }


def test_rows_that_ask_for_nothing_keep_their_bits(device: torch.device) -> None:
    nan = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32).item()
    logits = torch.tensor([[-0.0, math.inf, -math.inf, nan], [1e-45, 2, 3, 4]], device=device)
    tables = neutral(device)
    tables.presence[1] = 1.0
    tables.history[1] = 1
    result = ops.process_logits(logits, tables, **plain(2, device))
    assert_same_bits(result[0], logits[0])
    assert_same_bits(result[1, ::2], logits[1, ::2])
    assert result[1, 1].item() == 1.0
    assert (tables.history[[0, 2]] == 0).all()


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    tables = tables_of(8, 5000, generator)
    columns = columns_of(8, 8, 5000, generator)
    logits = torch.randn(8, 5000, generator=generator)
    whole = ops.process_logits(
        logits.to(device), on(device, tables), **{n: c.to(device) for n, c in columns.items()}
    )
    for row in range(8):
        one = {n: (c if n == "seen" else c[row : row + 1]).to(device) for n, c in columns.items()}
        alone = ops.process_logits(logits[row : row + 1].to(device), on(device, tables), **one)
        assert_same_bits(alone[0], whole[row])


def test_forbidden_tokens_end_with_the_counter(device: torch.device) -> None:
    """As those that end a text are, before `min_tokens`."""
    tables = neutral(device)
    tables.edits[0] = 1
    tables.edit_ids[0, 0] = 2
    tables.edit_values[0, 0] = -math.inf
    tables.edit_ends[0, 0] = 4
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]], device=device)
    columns = plain(1, device)
    assert ops.process_logits(logits, tables, **columns)[0, 2].item() == -math.inf
    columns["counters"] += 1
    assert_same_bits(ops.process_logits(logits, tables, **columns), logits)


def test_strided_logits_and_given_outputs(device: torch.device) -> None:
    storage = torch.randn(2, 9, device=device)
    logits, out = storage[:, :4], torch.full((2, 6), 77.0, device=device)
    tables = neutral(device)
    tables.frequency[:] = 0.5
    expected = ops.process_logits(logits.contiguous(), tables, **plain(2, device))
    assert ops.process_logits(logits, tables, **plain(2, device), out=out[:, :4]) is not None
    assert_same_bits(out[:, :4], expected)
    assert (out[:, 4:] == 77).all()
    assert ops.process_logits(logits[:0], tables, **plain(0, device)).shape == (0, 4)


BAD = [
    ({"logits": torch.zeros(2, 4).half()}, TypeError, "logits: got dtype torch.float16"),
    ({"logits": torch.zeros(2, 0)}, ValueError, "logits: got V = 0"),
    ({"tables": None}, TypeError, "tables: got NoneType, expected LogitsTables"),
    ({"slots": torch.zeros(2).int()}, TypeError, "slots: got dtype torch.int32"),
    ({"counters": torch.zeros(3).long()}, ValueError, "counters: got shape"),
    ({"tokens": torch.zeros(2)}, TypeError, "tokens: got dtype torch.float32"),
    ({"repetition_penalty": None}, TypeError, "repetition_penalty: got NoneType"),
    ({"seen": torch.ones(2, 4).bool()}, ValueError, r"seen: got shape \[2, 4\], expected \[3, 4\]"),
    ({"out": torch.zeros(2, 5)}, ValueError, "out: got shape"),
    ({"stream": 4}, ValueError, "stream: got 4"),
]
BAD_TABLES = [
    ({"mask": torch.zeros(3, 2).int()}, ValueError, r"tables.mask: got shape \[3, 2\], expected"),
    ({"masked": torch.zeros(3).bool()}, TypeError, "tables.masked: got dtype torch.bool"),
    ({"history": torch.zeros(3, 0).int()}, ValueError, "tables.history: got L = 0"),
    (
        {"edit_ids": torch.zeros(3, 3).int()},
        ValueError,
        "tables.edit_values: got E = 2, expec",
    ),
    ({"edit_ends": torch.zeros(2, 3).long().t()}, ValueError, "tables.edit_ends: got strides"),
    ({"presence": torch.zeros(4)}, ValueError, "tables.presence: got shape"),
]


@pytest.mark.parametrize(("changes", "error", "match"), BAD)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    cpu = torch.device("cpu")
    arguments = {"logits": torch.zeros(2, 4), "tables": neutral(cpu), **plain(2, cpu)}
    with pytest.raises(error, match=match):
        ops.process_logits(**{**arguments, **changes})


@pytest.mark.parametrize(("changes", "error", "match"), BAD_TABLES)
def test_bad_tables(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    cpu = torch.device("cpu")
    tables = replace(neutral(cpu), **changes)
    with pytest.raises(error, match=match):
        ops.process_logits(torch.zeros(2, 4), tables, **plain(2, cpu))
