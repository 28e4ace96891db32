"""Looking up the embeddings of tokens, and noting which tokens were seen."""

from __future__ import annotations

import torch

from ..jit.variants import Embed
from .common import checks
from .common.device import has_kernel
from .common.torch_library import register
from .embed_cuda import embed_rows


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    *,
    seen: torch.Tensor | None = None,
    seen_rows: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    check_bounds: bool = False,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Return the row of the table that each token names, and mark the tokens in `seen`.

    On a Hopper GPU both are one launch, and ids out of range, negative ones too, are taken for the
    last row of what they point into: a wrong result, but nothing outside of the tensors is touched.

    Args:
        tokens: [T] int64 ids, 0 to V - 1.
        table: [V, H] bf16, fp16 or fp32, V and H at least 1.
        seen: [S, V] bool, S at least 1: element [seen_rows[t], tokens[t]] becomes True for every t,
            others stay (see `sample`); goes with `seen_rows`.
        seen_rows: [T] int64, 0 to S - 1, any of them as often as wanted.
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
    vocabulary, dim = table.shape
    checks.tensor("tokens", tokens, (torch.int64,), ("T",), device)
    checks.int32_sizes("tokens", tokens.shape, "T")
    count = tokens.size(0)
    checks.both_or_neither("seen", seen, "seen_rows", seen_rows)
    if seen is not None and seen_rows is not None:
        checks.output("seen", seen, (torch.bool,), ("S", vocabulary), device)
        checks.not_empty("seen", seen, "S", "V")
        checks.int32_sizes("seen", seen.shape, "S", "V")
        checks.tensor("seen_rows", seen_rows, (torch.int64,), (count,), device)
    checks.active(n_active, device)
    checks.flag("check_bounds", check_bounds)
    if out is not None:
        checks.output("out", out, (dtype,), (count, dim), device)
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty(count, dim, dtype=dtype, device=device)
        _embed_op(tokens, table, seen, seen_rows, n_active, check_bounds, out)
    return out


def _embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    seen: torch.Tensor | None,
    seen_rows: torch.Tensor | None,
    n_active: torch.Tensor | None,
    check_bounds: bool,
    out: torch.Tensor,
) -> None:
    if tokens.size(0) == 0:
        return
    if check_bounds or tokens.device.type == "cpu":
        checks.token_values("tokens", tokens.tolist(), least=0, most=table.size(0) - 1)
        if seen is not None and seen_rows is not None:
            checks.token_values("seen_rows", seen_rows.tolist(), least=0, most=seen.size(0) - 1)
    if has_kernel(Embed, table):
        embed_rows(tokens, table, seen, seen_rows, n_active, out)
        return
    torch.index_select(table, 0, tokens, out=out)
    if seen is not None and seen_rows is not None:
        # Assigning Python's True would copy it from the host, which no capture allows.
        seen[seen_rows, tokens] = torch.ones((), dtype=torch.bool, device=seen.device)


_embed_op = register(
    "embed(Tensor tokens, Tensor table, Tensor(a!)? seen, Tensor? seen_rows, Tensor? n_active, "
    "bool check_bounds, Tensor(b!) out) -> ()",
    _embed,
)
