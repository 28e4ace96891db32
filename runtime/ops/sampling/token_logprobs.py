"""Log-probabilities of one token a row, and of the row's best tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.variant import Variant
from ..common import checks, pdl
from ..common.device import current_stream, has_kernel, on_device
from ..common.torch_library import register


@dataclass(frozen=True, kw_only=True)
class TokenLogprobsKernel(Variant):
    """The kernel: log-probabilities of fp32 logits."""

    family: ClassVar[str] = "token_logprobs"
    source: ClassVar[Path] = CSRC / "token_logprobs" / "token_logprobs.cu"
    needs: ClassVar[frozenset[str]] = frozenset()
    dtype: ClassVar[str] = "fp32"

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def defines(self) -> dict[str, str]:
        return {}


register_family(TokenLogprobsKernel, [TokenLogprobsKernel()])


class RowLogprobs(NamedTuple):
    """Results of `token_logprobs`.

    `values` [B, 1 + most] fp32: the natural logarithm of the probability of each row's token, then
    those of its best tokens; `ids` [B, most] int32: the best tokens.
    """

    values: torch.Tensor
    ids: torch.Tensor


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    wanted: torch.Tensor,
    slots: torch.Tensor,
    most: int,
    stream: checks.Stream = None,
) -> RowLogprobs:
    """Return log-probabilities of tokens, and the tokens with the largest of each row.

    The best come by falling logit, of equal ones the lowest id first. Where a row wants fewer than
    `most` of them, or has fewer tokens, the rest is 0 and -1. A row that has NaN, or whose best
    logit is infinite, has NaN for log-probabilities.

    On a GPU, from sm_80 on, this is one launch.

    Args:
        logits: [B, V] fp32, V >= 1.
        tokens: [B] int64; one outside the vocabulary has NaN.
        wanted: [S] int32, how many of the best: 0 to `most`; below 0 the row is all 0 and -1, and
            its logits are not read.
        slots: [B] int64 in 0 .. S - 1, which of `wanted` is each row's.
        most: columns for the best, >= 0.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.tensor("logits", logits, (torch.float32,), ("B", "V"))
    checks.not_empty("logits", logits, "V")
    checks.int32_sizes("logits", logits.shape, "B", "V")
    device, rows = logits.device, logits.size(0)
    checks.tensor("tokens", tokens, (torch.int64,), (rows,), device)
    checks.tensor("wanted", wanted, (torch.int32,), ("S",), device)
    checks.tensor("slots", slots, (torch.int64,), (rows,), device)
    checks.integer("most", most, least=0)
    with checks.launch_stream(stream, device):
        values = torch.empty((rows, 1 + most), dtype=torch.float32, device=device)
        ids = torch.empty((rows, most), dtype=torch.int32, device=device)
        _token_logprobs_op(logits, tokens, wanted, slots, values, ids)
    return RowLogprobs(values, ids)


def _token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    if logits.size(0) == 0:
        return
    if has_kernel(TokenLogprobsKernel, logits):
        device = logits.get_device()
        with on_device(device):
            stream = current_stream(device)
            load(TokenLogprobsKernel(), device=device, stream=stream).launch(
                logits=logits.data_ptr(),
                logits_stride=logits.stride(0),
                tokens=tokens.data_ptr(),
                wanted=wanted.data_ptr(),
                slots=slots.data_ptr(),
                logprobs=values.data_ptr(),
                ids=ids.data_ptr(),
                most=ids.size(1),
                rows=logits.size(0),
                vocabulary=logits.size(1),
                pdl=pdl.enabled(),
                stream=stream,
            )
        return
    counts = wanted[slots]
    if logits.device.type != "cpu":
        _write(logits, tokens, counts, values, ids)
        return
    values.zero_()
    ids.fill_(-1)
    asking = (counts >= 0).nonzero().squeeze(1)  # sorting is the costly part
    if asking.numel():
        found, best = values[asking], ids[asking]
        _write(logits[asking], tokens[asking], counts[asking], found, best)
        values[asking], ids[asking] = found, best


def _write(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    vocabulary, most = logits.size(1), ids.size(1)
    is_nan = logits.isnan().any(dim=1, keepdim=True)
    logprobs = logits.log_softmax(dim=1)
    known = ((tokens >= 0) & (tokens < vocabulary))[:, None] & ~is_nan
    chosen = logprobs.gather(1, tokens.clamp(0, vocabulary - 1)[:, None])
    chosen = torch.where(known, chosen, torch.nan)
    values[:, :1] = torch.where(counts[:, None] >= 0, chosen, 0.0)

    best = logits.sort(dim=1, descending=True, stable=True).indices[:, :most]
    rank = torch.arange(best.size(1), device=logits.device)
    listed = rank < counts[:, None]
    values[:, 1:] = 0.0
    ids.fill_(-1)
    found = torch.where(is_nan, torch.nan, logprobs.gather(1, best))
    values[:, 1 : 1 + best.size(1)] = torch.where(listed, found, 0.0)
    ids[:, : best.size(1)] = torch.where(listed & ~is_nan, best, -1).int()


_token_logprobs_op = register(
    "token_logprobs(Tensor logits, Tensor tokens, Tensor wanted, Tensor slots, Tensor(a!) values, "
    "Tensor(b!) ids) -> ()",
    _token_logprobs,
)
