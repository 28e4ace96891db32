"""Merging attention to some keys with attention to others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.variant import FLOAT_DTYPES, OneDtypeVariant
from ..common import checks, pdl
from ..common.device import KERNEL_NAMES, current_stream, has_kernel, heads_of, on_device
from ..common.torch_library import register

_LSE_SHAPE = ("tokens", "heads")
_MOST_ROWS = 2**32 - 1  # the kernel counts them in 32 bits


@dataclass(frozen=True, kw_only=True)
class MergeStates(OneDtypeVariant):
    """The kernel: attention to some keys and attention to others, merged.

    Args:
        dtype: of the outputs.
    """

    family: ClassVar[str] = "merge_states"
    source: ClassVar[Path] = CSRC / "attention" / "merge" / "merge_states.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


register_family(MergeStates, [MergeStates(dtype=dtype) for dtype in FLOAT_DTYPES])


def merge_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of queries to two sets of keys, from their attention to each of them.

    out = (exp(lse_a)·o_a + exp(lse_b)·o_b) / (exp(lse_a) + exp(lse_b)), and its LSE is the
    logarithm of that denominator (Ye et al., "FlashInfer", 2025, "attention composition"). So
    queries that share a prefix attend to it together, then each to its own keys. With sinks, give
    them to one of the two calls.

    A state with an LSE of -inf, of a query that saw no key, has no part in the result, whatever
    its output holds, NaN included; two of them merge into out = 0 and LSE = -inf. An LSE that is
    NaN spreads. On a GPU, from sm_80 on, all of it is one launch.

    Args:
        o_a: [tokens, heads, dim] bf16, fp16 or fp32.
        lse_a: [tokens, heads] fp32, natural logarithms, of any strides.
        o_b: like o_a.
        lse_b: like lse_a.
        out: like o_a, and may be o_a or o_b itself; allocated when None.
        out_lse: like lse_a, and may be lse_a or lse_b itself; allocated when None.
        stream: see `ostinato.ops`.

    Returns:
        (out, out_lse).

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.tensor("o_a", o_a, checks.FLOAT_DTYPES, ("tokens", "heads", "dim"))
    checks.not_empty("o_a", o_a, "heads", "dim")
    checks.int32_sizes("o_a", o_a.shape, "tokens", "heads", "dim")
    shape, dtype, device = o_a.shape, o_a.dtype, o_a.device
    tokens, heads = shape[:2]
    if tokens * heads > _MOST_ROWS:
        raise ValueError(
            f"o_a: got {tokens} tokens of {heads} heads, expected at most {_MOST_ROWS} together"
        )
    checks.tensor("o_b", o_b, (dtype,), shape, device)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        checks.tensor(name, lse, (torch.float32,), shape[:2], device, any_strides=True)
    if out is not None:
        checks.output("out", out, (dtype,), shape, device)
    if out_lse is not None:
        checks.tensor("out_lse", out_lse, (torch.float32,), shape[:2], device, any_strides=True)
        checks.writable("out_lse", out_lse)
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=device)
        if out_lse is None:
            out_lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        _merge_states_op(o_a, lse_a, o_b, lse_b, out, out_lse)
    return out, out_lse


def _merge_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
) -> None:
    if has_kernel(MergeStates, o_a):
        merge_on_device(o_a, lse_a, o_b, lse_b, out, out_lse)
        return
    top = torch.maximum(lse_a, lse_b)
    # Where there are no keys at all, -inf minus -inf would be NaN.
    shift = top.masked_fill(top == float("-inf"), 0.0)
    weights = [torch.exp(lse - shift) for lse in (lse_a, lse_b)]
    total = weights[0] + weights[1]
    merged = torch.zeros(o_a.shape, dtype=torch.float32, device=o_a.device)
    for o, weight in zip((o_a, o_b), weights, strict=True):
        share = (weight / total).unsqueeze(-1)
        # A weight of 0 does not silence NaN.
        merged += torch.where(weight.unsqueeze(-1) == 0, 0.0, share * o.float())
    out.copy_(merged)
    out_lse.copy_(torch.where(total == 0, top, shift + total.log()))


def merge_on_device(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
) -> None:
    """Launch the kernel on torch's current stream; the arguments are those of the op, checked.

    The kernel before it on the stream may still be writing any of these.
    """
    if o_a.size(0) == 0:
        return
    device = o_a.get_device()
    tokens, heads, dim = o_a.shape
    with on_device(device):
        stream = current_stream(device)
        variant = MergeStates(dtype=KERNEL_NAMES[o_a.dtype])
        load(variant, device=device, stream=stream).launch(
            o_a=heads_of(o_a),
            lse_a=heads_of(lse_a),
            o_b=heads_of(o_b),
            lse_b=heads_of(lse_b),
            out=heads_of(out),
            out_lse=heads_of(out_lse),
            tokens=tokens,
            heads=heads,
            dim=dim,
            stream=stream,
            pdl=pdl.enabled(),
        )


_merge_states_op = register(
    "merge_states(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, Tensor(a!) out, "
    "Tensor(b!) out_lse) -> ()",
    _merge_states,
)
