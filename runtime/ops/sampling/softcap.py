"""Capping logits smoothly before a token is chosen from them."""

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
from ..common.device import KERNEL_NAMES, address_of, current_stream, has_kernel, on_device
from ..common.torch_library import register

_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Softcap(OneDtypeVariant):
    """The kernel: logits capped in place.

    Args:
        dtype: of the logits.
    """

    family: ClassVar[str] = "softcap"
    source: ClassVar[Path] = CSRC / "softcap" / "softcap.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


register_family(Softcap, [Softcap(dtype=dtype) for dtype in FLOAT_DTYPES])


def softcap(
    logits: torch.Tensor,
    cap: float,
    *,
    temperature: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Turn each logit into cap·tanh(logit / cap), in place (Gemma 2, arXiv 2408.00118, §2).

    No order of logits changes by it, so that rows of which `sample` takes the best stay as they
    are: those of temperature 0 with a repetition penalty of 1, where these are given. Such rows may
    be undefined, as `Logits` of the output projection has them.

    On a GPU, from sm_80 on, this is one launch.

    Args:
        logits: [B, V] bf16, fp16 or fp32; written and returned.
        cap: above 0.
        temperature: [B] fp32, that of `sample`; None: every row is capped.
        repetition_penalty: [B] fp32, likewise, with a temperature only; None: 1 everywhere.
        n_active: int32 [1], how many rows are real: those after them may be capped or not.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.tensor("logits", logits, checks.FLOAT_DTYPES, ("B", "V"))
    checks.int32_sizes("logits", logits.shape, "B", "V")
    checks.writable("logits", logits)
    checks.number("cap", cap, least=_LEAST)
    rows = logits.shape[:1]
    if temperature is not None:
        checks.tensor("temperature", temperature, (torch.float32,), rows, logits.device)
    if repetition_penalty is not None:
        if temperature is None:
            raise ValueError("repetition_penalty: got a tensor, expected None without temperature")
        checks.tensor(
            "repetition_penalty", repetition_penalty, (torch.float32,), rows, logits.device
        )
    checks.active(n_active, logits.device)
    with checks.launch_stream(stream, logits.device):
        _softcap_op(logits, cap, temperature, repetition_penalty, n_active)
    return logits


def _softcap(
    logits: torch.Tensor,
    cap: float,
    temperature: torch.Tensor | None,
    repetition_penalty: torch.Tensor | None,
    n_active: torch.Tensor | None,
) -> None:
    if logits.numel() == 0:
        return
    if has_kernel(Softcap, logits):
        softcap_rows(logits, cap, temperature, repetition_penalty, n_active)
        return
    if temperature is None:
        logits.copy_(_capped(logits, cap))
        return
    chosen = temperature > 0
    if repetition_penalty is not None:
        chosen |= repetition_penalty != 1
    if logits.device.type == "cpu":  # which may look for them
        rows = chosen.nonzero().squeeze(1)
        logits[rows] = _capped(logits[rows], cap).to(logits.dtype)
        return
    logits.copy_(torch.where(chosen.unsqueeze(1), _capped(logits, cap), logits))


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the capped logits in fp32."""
    return logits.float().div(cap).tanh_().mul_(cap)


def softcap_kernel(dtype: torch.dtype) -> Softcap:
    """Return the kernel for logits of this dtype."""
    return Softcap(dtype=KERNEL_NAMES[dtype])


def softcap_rows(
    logits: torch.Tensor,
    cap: float,
    temperature: torch.Tensor | None,
    repetition_penalty: torch.Tensor | None,
    n_active: torch.Tensor | None,
) -> None:
    """Launch csrc/softcap/softcap.cu on torch's current stream.

    The arguments are those of the op, checked. The kernel reads and writes none of these tensors
    before the kernels in front of it on the stream have ended.
    """
    device = logits.get_device()
    with on_device(device):
        stream = current_stream(device)
        load(softcap_kernel(logits.dtype), device=device, stream=stream).launch(
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            cap=cap,
            temperature=address_of(temperature),
            repetition_penalty=address_of(repetition_penalty),
            n_active=address_of(n_active),
            rows=logits.size(0),
            vocabulary=logits.size(1),
            pdl=pdl.enabled(),
            stream=stream,
        )


_softcap_op = register(
    "softcap(Tensor(a!) logits, float cap, Tensor? temperature, Tensor? repetition_penalty, "
    "Tensor? n_active) -> ()",
    _softcap,
)
