"""The output projection of tokens whose successors are sampled from its results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.torch_library import register
from ..sampling.argmax_key import argmax_keys
from .fused import codes_of, rms_norm_w8a8_linear
from .gemm_variants import GemmTiled
from .linear import (
    check_dense_weight,
    check_weight,
    dense_multiply,
    linear,
    multiply,
    runs_dense_kernel,
)
from .norms import check_norm, normalize_and_quantize
from .packed_weight import PackedWeight, data_of
from .w8a8_gemm import ToSample, argmax_parts


@dataclass(frozen=True)
class Logits:
    """Logits as `sample` takes them.

    `values` [B, V] fp32, bf16 or fp16. With `argmax` [B, P] int64 the rows of greedy requests
    without a repetition penalty are undefined: their best tokens are in `argmax`, as
    `ostinato.ops.sample` has it.
    """

    values: torch.Tensor
    argmax: torch.Tensor | None = None


def linear_logits(
    x: torch.Tensor,
    w: torch.Tensor | PackedWeight,
    *,
    temperature: torch.Tensor,
    repetition_penalty: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> Logits:
    """Do `linear` with fp32 results, to be given to `sample`.

    On CUDA, with 16-bit operands and from 17 tokens on, the product returns the best logits of
    greedy rows and does not store the others: a token is chosen without writing and reading its
    whole row. `temperature` and `repetition_penalty` (None: 1 everywhere) are [M] fp32, those of
    `sample`; all else is as for `linear`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", "K"))
    shape = check_dense_weight(w, x, bias, torch.float32)
    checks.active(n_active, x.device)
    _check_sampling(temperature, repetition_penalty, x)
    data = data_of(w)
    parts = argmax_parts(x, shape[1], data, True) if runs_dense_kernel(x) else 0
    if parts == 0:
        fp32 = torch.float32
        return Logits(linear(x, w, bias=bias, n_active=n_active, out_dtype=fp32, stream=stream))
    with checks.launch_stream(stream, x.device):
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
        argmax = torch.empty((shape[0], parts), dtype=torch.int64, device=x.device)
        sampling = (temperature, repetition_penalty)
        _linear_logits_op(x, data, bias, n_active, *sampling, out, argmax)
    return Logits(out, argmax)


def rms_norm_w8a8_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    w: torch.Tensor | PackedWeight,
    w_scale: torch.Tensor,
    *,
    temperature: torch.Tensor,
    repetition_penalty: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    batch_invariant: bool = False,
    stream: checks.Stream = None,
) -> Logits:
    """Do `rms_norm_w8a8_linear` with fp32 results, to be given to `sample`.

    On CUDA, from 17 tokens on, the product returns the best logits of greedy rows and does not
    store the others: a token is chosen without writing and reading its whole row. `temperature` and
    `repetition_penalty` (None: 1 everywhere) are [M] fp32, those of `sample`; all else is as for
    `rms_norm_w8a8_linear`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    check_norm(x, weight, eps, residual)
    shape = (x.size(0), check_weight(w, x.shape, w_scale, bias, torch.float32, x.device))
    checks.active(n_active, x.device)
    checks.flag("batch_invariant", batch_invariant)
    _check_sampling(temperature, repetition_penalty, x)
    data = data_of(w)
    parts = argmax_parts(x, shape[1], data, batch_invariant) if has_kernel(GemmTiled, x) else 0
    if parts == 0:
        logits, *_ = rms_norm_w8a8_linear(
            x,
            weight,
            eps,
            w,
            w_scale,
            residual=residual,
            bias=bias,
            n_active=n_active,
            out_dtype=torch.float32,
            batch_invariant=batch_invariant,
            stream=stream,
        )
        return Logits(logits)
    with checks.launch_stream(stream, x.device):
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
        argmax = torch.empty((shape[0], parts), dtype=torch.int64, device=x.device)
        _rms_norm_w8a8_logits_op(
            x,
            weight,
            eps,
            residual,
            data,
            w_scale,
            bias,
            n_active,
            batch_invariant,
            temperature,
            repetition_penalty,
            out,
            argmax,
        )
    return Logits(out, argmax)


def _check_sampling(
    temperature: torch.Tensor, repetition_penalty: torch.Tensor | None, x: torch.Tensor
) -> None:
    rows = x.shape[:1]
    checks.tensor("temperature", temperature, (torch.float32,), rows, x.device)
    if repetition_penalty is not None:
        checks.tensor("repetition_penalty", repetition_penalty, (torch.float32,), rows, x.device)


def _linear_logits(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    n_active: torch.Tensor | None,
    temperature: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    out: torch.Tensor,
    argmax: torch.Tensor,
) -> None:
    to_sample = None
    if runs_dense_kernel(x):
        to_sample = ToSample(argmax, temperature, repetition_penalty)
    dense_multiply(x, w, bias, n_active, out, to_sample)
    if to_sample is None:
        argmax.copy_(argmax_keys(out))


def _rms_norm_w8a8_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n_active: torch.Tensor | None,
    batch_invariant: bool,
    temperature: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    out: torch.Tensor,
    argmax: torch.Tensor,
) -> None:
    codes, scale = codes_of(x, w)
    total = None if residual is None else torch.empty_like(x)
    outputs = (codes, scale, total)
    normalize_and_quantize(
        "rms_norm", x, weight, None, eps, residual, None, None, False, *outputs, n_active
    )
    operands = (codes, w, scale, w_scale, bias, None, None, n_active)
    to_sample = None
    if has_kernel(GemmTiled, x):
        to_sample = ToSample(argmax, temperature, repetition_penalty)
    multiply(*operands, True, batch_invariant, False, out, to_sample)
    if to_sample is None:
        argmax.copy_(argmax_keys(out))


_linear_logits_op = register(
    "linear_logits(Tensor x, Tensor w, Tensor? bias, Tensor? n_active, Tensor temperature, "
    "Tensor? repetition_penalty, Tensor(a!) out, Tensor(b!) argmax) -> ()",
    _linear_logits,
)
_rms_norm_w8a8_logits_op = register(
    "rms_norm_w8a8_logits(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor w, "
    "Tensor w_scale, Tensor? bias, Tensor? n_active, bool batch_invariant, Tensor temperature, "
    "Tensor? repetition_penalty, Tensor(a!) out, Tensor(b!) argmax) -> ()",
    _rms_norm_w8a8_logits,
)
