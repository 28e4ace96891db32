"""From tensors to the arguments of the kernel behind `embed`, on a machine without GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from ostinato.ops.common.pdl import pdl
from ostinato.ops.embed import Embed

embed_module = import_module("ostinato.ops.embed")  # `ostinato.ops.embed` is the op

STREAM = 77


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Give what would have been launched: the kernel's arguments and its `variant`."""
    found: list[dict[str, Any]] = []

    class Library:
        def __init__(self, variant: Embed) -> None:
            self._variant = variant

        def launch(self, **arguments: Any) -> None:
            found.append({"variant": self._variant, **arguments})

    def load(variant: Embed, *, device: int, stream: int) -> Library:
        assert stream == STREAM
        return Library(variant)

    monkeypatch.setattr(embed_module, "load", load)
    monkeypatch.setattr(embed_module, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(embed_module, "on_device", lambda device: torch.no_grad())
    return found


def test_every_tensor_reaches_the_kernel_as_it_lies(launches: list[dict[str, Any]]) -> None:
    tokens, rows = torch.arange(3), torch.arange(3)
    table = torch.zeros(50, 24, dtype=torch.bfloat16)[:, :16]
    seen = torch.zeros(4, 60, dtype=torch.bool)[:, :50]
    n_active, out = torch.ones(1, dtype=torch.int32), torch.zeros(3, 2, 16).bfloat16()[:, 1]
    embed_module.embed_rows(tokens, table, seen, rows, n_active, out)
    assert launches == [
        {
            "variant": Embed(dtype="bf16"),
            "tokens": tokens.data_ptr(),
            "table": table.data_ptr(),
            "table_stride": 24,
            "out": out.data_ptr(),
            "out_stride": 32,
            "rows": 3,
            "vocabulary": 50,
            "first_id": 0,
            "table_rows": 50,
            "dim": 16,
            "stream": STREAM,
            "seen": seen.data_ptr(),
            "seen_stride": 60,
            "seen_size": 4,
            "seen_rows": rows.data_ptr(),
            "n_active": n_active.data_ptr(),
            "pdl": True,
        }
    ]


def test_a_ranks_table_has_the_rows_of_some_tokens(launches: list[dict[str, Any]]) -> None:
    table, tokens = torch.zeros(20, 16), torch.arange(3)
    embed_module.embed_rows(tokens, table, None, None, None, table[:3], 20, 50)
    (launch,) = launches
    assert [launch[name] for name in ("first_id", "table_rows", "vocabulary")] == [20, 20, 50]


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.float16, "fp16")], ids=str
)
def test_what_is_not_given_is_null(
    dtype: torch.dtype, name: str, launches: list[dict[str, Any]]
) -> None:
    table = torch.zeros(50, 16, dtype=dtype)
    with pdl(False):
        embed_module.embed_rows(torch.arange(3), table, None, None, None, table[:3])
    (launch,) = launches
    assert launch["variant"] == Embed(dtype=name)
    for field in ("seen", "seen_stride", "seen_size", "seen_rows", "n_active", "pdl"):
        assert launch[field] == 0
