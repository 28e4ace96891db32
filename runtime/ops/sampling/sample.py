"""Choosing the next token from logits: greedy, or by temperature, top-k, top-p and min-p."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.torch_library import register
from . import sample_cuda
from .argmax_key import argmax_tokens
from .philox import uniform


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    repetition_penalty: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    seen_rows: torch.Tensor | None = None,
    argmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Choose one token per row of logits [B, V]; nothing is read on the host of a GPU's data.

    In this order: the repetition penalty divides the positive and multiplies the negative logits of
    tokens seen before (Keskar et al., "CTRL", 2019); temperature divides; top-k keeps the k largest
    logits; top-p the smallest set of the most probable tokens whose probability, among those left,
    reaches p (Holtzman et al., 2020); min-p those with at least p times the largest probability.
    One token always remains. Of those left, in order of falling logit and rising id, the token is
    where the cumulative probability passes a uniform number that depends on nothing but the row's
    seed and counter (`ostinato.ops.sampling.philox`). So a row's token is the same in every batch.

    Args:
        logits: [B, V] bf16, fp16 or fp32, V >= 1. A row with NaN has no token: it gives -1,
            whatever the other arguments. One whose best is infinite gives that token.
        temperature: [B] fp32, finite; 0 is greedy: the largest logit, of equal ones the lowest id.
        top_k: [B] int32 or int64; 0 keeps all.
        top_p: [B] fp32; from 1 on keeps all, 0 keeps one.
        min_p: [B] fp32 in 0..1; 0 keeps all.
        seeds: [B] int64, any value.
        counters: [B] int64, the index of the generated token in its request.
        repetition_penalty: [B] fp32 > 0; 1 changes nothing.
        seen: [B, V] bool, or [S, V] with `seen_rows`: the tokens that the penalty is for; goes with
            repetition_penalty.
        seen_rows: [B] int64 in 0 .. S - 1, which row of `seen` is each row's; out of range it is an
            IndexError on the CPU and undefined on CUDA.
        argmax: [B, P] int64, P >= 1, as `rms_norm_w8a8_logits` hands it over: of each part of a row
            the argmax key of its largest logit, unsigned: the smaller, the better, with the token
            in the lower 32 bits. With it the logits of greedy rows whose penalty is 1 are not read.
        out: [B] int64, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Returns:
        out: token ids, or -1, which `embed` takes for the last of the vocabulary.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.tensor("logits", logits, checks.FLOAT_DTYPES, ("B", "V"))
    checks.not_empty("logits", logits, "V")
    device = logits.device
    batch = (logits.size(0),)
    checks.tensor("temperature", temperature, (torch.float32,), batch, device)
    checks.tensor("top_k", top_k, (torch.int32, torch.int64), batch, device)
    checks.tensor("top_p", top_p, (torch.float32,), batch, device)
    checks.tensor("min_p", min_p, (torch.float32,), batch, device)
    checks.tensor("seeds", seeds, (torch.int64,), batch, device)
    checks.tensor("counters", counters, (torch.int64,), batch, device)
    checks.both_or_neither("repetition_penalty", repetition_penalty, "seen", seen)
    if repetition_penalty is not None and seen is not None:
        checks.tensor("repetition_penalty", repetition_penalty, (torch.float32,), batch, device)
        seen_shape = logits.shape if seen_rows is None else ("S", logits.size(1))
        checks.tensor("seen", seen, (torch.bool,), seen_shape, device)
    if seen_rows is not None:
        checks.both_or_neither("seen", seen, "seen_rows", seen_rows)
        checks.tensor("seen_rows", seen_rows, (torch.int64,), batch, device)
    if argmax is not None:
        checks.tensor("argmax", argmax, (torch.int64,), (*batch, "P"), device)
        checks.not_empty("argmax", argmax, "P")
    if out is not None:
        checks.output("out", out, (torch.int64,), batch, device)
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty(batch, dtype=torch.int64, device=device)
        _sample_op(
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            counters,
            repetition_penalty,
            seen,
            seen_rows,
            argmax,
            out,
        )
    return out


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    seen: torch.Tensor | None,
    seen_rows: torch.Tensor | None,
    argmax: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    parameters = (temperature, top_k, top_p, min_p, seeds, counters)
    if sample_cuda.serves(logits):
        sample_cuda.sample(logits, *parameters, repetition_penalty, seen, seen_rows, argmax, out)
        return
    if seen is not None and seen_rows is not None:
        seen = seen.index_select(0, seen_rows)  # a negative row is no row
    logits = _penalized(logits, repetition_penalty, seen)
    greedy = logits.argmax(dim=1, keepdim=True)  # of NaN, if there is any
    greedy = torch.where(logits.gather(1, greedy).isnan(), -1, greedy).squeeze(1)
    if argmax is not None:
        token = argmax_tokens(argmax)
        if repetition_penalty is not None:
            token = torch.where(repetition_penalty == 1, token, greedy)
        greedy = token
    if logits.device.type != "cpu":
        torch.where(temperature > 0, _drawn(logits, *parameters), greedy, out=out)
        return
    out.copy_(greedy)
    # Sorting is the costly part, and the CPU may look which rows need it.
    random = (temperature > 0).nonzero().squeeze(1)
    if random.numel():
        out[random] = _drawn(logits[random], *(parameter[random] for parameter in parameters))


def _penalized(
    logits: torch.Tensor, penalty: torch.Tensor | None, seen: torch.Tensor | None
) -> torch.Tensor:
    logits = logits.float()
    if penalty is None or seen is None:
        return logits
    if logits.device.type == "cpu" and bool((penalty == 1).all()):
        return logits
    penalty = penalty.unsqueeze(1)
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def _drawn(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Return one random token per row; a row of temperature 0 gets an arbitrary one."""
    vocabulary = logits.size(1)
    falling, ids = logits.sort(dim=1, descending=True, stable=True)
    # In fp64, with 53 random bits, even the tokens of a tail of 2⁻³⁰ are drawn at their rate. The
    # maximum is subtracted before dividing, so that no temperature overflows.
    falling = falling.double()
    weights = torch.exp((falling - falling[:, :1]) / temperature.double().unsqueeze(1))

    # Every filter keeps a prefix of the sorted row, so it is enough to count.
    limit = torch.where(top_k > 0, top_k, vocabulary).unsqueeze(1)
    rank = torch.arange(vocabulary, device=logits.device)
    weights = torch.where(rank < limit, weights, 0.0)
    cumulative = _cumulative(weights)
    above = cumulative.roll(1, dims=1)
    above[:, 0] = 0.0
    nucleus = top_p.double().unsqueeze(1)
    kept = (rank < limit) & (weights >= min_p.unsqueeze(1))
    kept &= (above < nucleus * cumulative[:, -1:]) | (nucleus >= 1.0)
    last = (kept.sum(dim=1, keepdim=True) - 1).clamp_min_(0)

    threshold = uniform(seeds, counters).unsqueeze(1) * cumulative.gather(1, last)
    place = torch.searchsorted(cumulative, threshold, right=True)
    token = ids.gather(1, torch.minimum(place, last)).squeeze(1)
    # Where the best is infinite or NaN, no distance from it is a number.
    best = falling[:, 0]
    return torch.where(best.isfinite(), token, torch.where(best.isnan(), -1, ids[:, 0]))


def _cumulative(weights: torch.Tensor) -> torch.Tensor:
    if weights.device.type == "cpu":
        return weights.cumsum(dim=1)
    # A GPU's scan adds in an order chosen by the number of rows: one row at a time fixes it.
    out = torch.empty_like(weights)
    for row, total in zip(weights.split(1), out.split(1), strict=True):
        torch.cumsum(row, dim=1, out=total)
    return out


_sample_op = register(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seeds, Tensor counters, Tensor? repetition_penalty, Tensor? seen, Tensor? seen_rows, "
    "Tensor? argmax, Tensor(a!) out) -> ()",
    _sample,
)
