"""Looking up the embeddings of tokens, and noting which tokens were seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ..jit.loader import load
from ..jit.registry import register_family
from ..jit.sources import CSRC
from ..jit.variant import FLOAT_DTYPES, OneDtypeVariant
from .common import checks, pdl
from .common.device import KERNEL_NAMES, address_of, current_stream, has_kernel, on_device
from .common.torch_library import register


@dataclass(frozen=True, kw_only=True)
class Embed(OneDtypeVariant):
    """The kernel: rows of the embedding table, and marks of the tokens that were seen.

    Args:
        dtype: of the table.
    """

    family: ClassVar[str] = "embed"
    source: ClassVar[Path] = CSRC / "embed" / "embed.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


register_family(Embed, [Embed(dtype=dtype) for dtype in FLOAT_DTYPES])


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    *,
    seen: torch.Tensor | None = None,
    seen_rows: torch.Tensor | None = None,
    first_id: int = 0,
    vocabulary: int | None = None,
    n_active: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    check_bounds: bool = False,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Return the row of the table that each token names, and mark the tokens in `seen`.

    Of a table that several ranks divide, one has some rows: tokens whose rows others have get
    zeros, so that the ranks' results add up to those of the whole table.

    On a GPU, from sm_80 on, both are one launch, and ids out of range, negative ones too, are taken
    for the last row of what they point into: a wrong result, but nothing outside of the tensors is
    touched.

    Args:
        tokens: [T] int64 ids, 0 to N - 1; or -1, which `sample` gives for logits that are NaN, and
            which is taken for the last of the vocabulary on a CPU, too.
        table: [V, H] bf16, fp16 or fp32, V and H at least 1.
        seen: [S, N] bool, S at least 1: element [seen_rows[t], tokens[t]] becomes True for every t,
            others stay (see `sample`); goes with `seen_rows`.
        seen_rows: [T] int64, 0 to S - 1, any of them as often as wanted.
        first_id: the token of the table's first row, with `vocabulary`.
        vocabulary: N, how many tokens there are, first_id + V at least; None: V, and `first_id` 0.
        n_active: int32 [1], how many tokens are real: those after them are padding, whose rows of
            `out` and marks in `seen` may be written or left as they are. Their ids must be in range
            all the same.
        out: [T, H] of the table's dtype, written and returned; allocated when None.
        check_bounds: check the ids, which the host must see for it. The CPU always does.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.tensor("table", table, checks.FLOAT_DTYPES, ("V", "H"))
    checks.not_empty("table", table, "V", "H")
    checks.int32_sizes("table", table.shape, "V", "H")
    device, dtype = table.device, table.dtype
    dim = table.size(1)
    vocabulary = _vocabulary(table, first_id, vocabulary)
    checks.tensor("tokens", tokens, (torch.int64,), ("T",), device)
    checks.int32_sizes("tokens", tokens.shape, "T")
    count = tokens.size(0)
    checks.both_or_neither("seen", seen, "seen_rows", seen_rows)
    if seen is not None and seen_rows is not None:
        checks.output("seen", seen, (torch.bool,), ("S", vocabulary), device)
        checks.not_empty("seen", seen, "S", "N")
        checks.int32_sizes("seen", seen.shape, "S", "N")
        checks.tensor("seen_rows", seen_rows, (torch.int64,), (count,), device)
    checks.active(n_active, device)
    checks.flag("check_bounds", check_bounds)
    if out is not None:
        checks.output("out", out, (dtype,), (count, dim), device)
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty(count, dim, dtype=dtype, device=device)
        ids = (first_id, vocabulary)
        _embed_op(tokens, table, seen, seen_rows, *ids, n_active, check_bounds, out)
    return out


def _vocabulary(table: torch.Tensor, first_id: int, vocabulary: int | None) -> int:
    """Return how many tokens there are, of which the table has those from `first_id` on."""
    if vocabulary is None:
        if first_id != 0:
            raise ValueError(f"first_id: got {first_id!r}, expected 0 without a vocabulary")
        return table.size(0)
    checks.integer("first_id", first_id, least=0)
    checks.integer("vocabulary", vocabulary, least=first_id + table.size(0))
    checks.int32_sizes("vocabulary", (vocabulary,), "N")
    return vocabulary


def _embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    seen: torch.Tensor | None,
    seen_rows: torch.Tensor | None,
    first_id: int,
    vocabulary: int,
    n_active: torch.Tensor | None,
    check_bounds: bool,
    out: torch.Tensor,
) -> None:
    if tokens.size(0) == 0:
        return
    if check_bounds or tokens.device.type == "cpu":
        checks.token_values("tokens", tokens.tolist(), least=-1, most=vocabulary - 1)
        if seen is not None and seen_rows is not None:
            checks.token_values("seen_rows", seen_rows.tolist(), least=0, most=seen.size(0) - 1)
    if has_kernel(Embed, table):
        embed_rows(tokens, table, seen, seen_rows, n_active, out, first_id, vocabulary)
        return
    tokens = torch.where(tokens < 0, vocabulary - 1, tokens)
    if table.size(0) == vocabulary:
        torch.index_select(table, 0, tokens, out=out)
    else:
        rows = tokens - first_id
        held = (rows >= 0) & (rows < table.size(0))
        torch.index_select(table, 0, torch.where(held, rows, 0), out=out)
        out.masked_fill_(~held[:, None], 0)
    if seen is not None and seen_rows is not None:
        # Assigning Python's True would copy it from the host, which no capture allows.
        seen[seen_rows, tokens] = torch.ones((), dtype=torch.bool, device=seen.device)


def embed_kernel(dtype: torch.dtype) -> Embed:
    """Return the kernel for a table of this dtype."""
    return Embed(dtype=KERNEL_NAMES[dtype])


def embed_rows(
    tokens: torch.Tensor,
    table: torch.Tensor,
    seen: torch.Tensor | None,
    seen_rows: torch.Tensor | None,
    n_active: torch.Tensor | None,
    out: torch.Tensor,
    first_id: int = 0,
    vocabulary: int | None = None,
) -> None:
    """Launch csrc/embed/embed.cu on torch's current stream.

    The arguments are those of the op, checked, for at least one token. The kernel reads and writes
    none of these tensors before the kernels in front of it on the stream have ended, nor does it
    let the kernel behind it start before.
    """
    device = table.get_device()
    with on_device(device):
        stream = current_stream(device)
        load(embed_kernel(table.dtype), device=device, stream=stream).launch(
            tokens=tokens.data_ptr(),
            table=table.data_ptr(),
            table_stride=table.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=tokens.size(0),
            vocabulary=table.size(0) if vocabulary is None else vocabulary,
            first_id=first_id,
            table_rows=table.size(0),
            dim=table.size(1),
            stream=stream,
            seen=address_of(seen),
            seen_stride=0 if seen is None else seen.stride(0),
            seen_size=0 if seen is None else seen.size(0),
            seen_rows=address_of(seen_rows),
            n_active=address_of(n_active),
            pdl=pdl.enabled(),
        )


_embed_op = register(
    "embed(Tensor tokens, Tensor table, Tensor(a!)? seen, Tensor? seen_rows, int first_id, "
    "int vocabulary, Tensor? n_active, bool check_bounds, Tensor(b!) out) -> ()",
    _embed,
)
