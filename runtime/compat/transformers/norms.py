"""RMS norms of a model computed by `ostinato.ops.rms_norm`."""

from __future__ import annotations

import copy
import math
from inspect import signature

import torch

from ... import ops
from .replace import Forward, is_known_to_agree, replace_forwards

_EPS_NAMES = ("variance_epsilon", "eps")


def replace_norms(model: torch.nn.Module) -> list[str]:
    """Let `ops.rms_norm` compute the RMS norms of a model, in place, and return which.

    A submodule is replaced when its class has RMSNorm in its name, it has a parameter `weight` [K]
    and a number `variance_epsilon` or `eps`, its forward takes one tensor, and it computes what the
    op does. The last is tried on random numbers, with a random weight in place of its own, as
    weights of ones or zeros hide what is done with them. All else is left as it is: norms that
    multiply by 1 + weight (Gemma's), with a gate or without a weight; those that raise when they
    are tried, such as of a dtype that the op does not take or on the meta device; and modules whose
    `forward` is not their class's, such as those with hooks of accelerate and those replaced
    before. So a second call replaces nothing. A model that compressed-tensors has loaded may be
    given before its first forward, which decompresses it, or after that.

    Parameters and the state dict stay as they are: a replaced norm reads its weight at each call,
    be it written in place, moved or assigned anew. A deep or pickled copy of the model has norms of
    its own. What a replaced norm takes:

    - x [..., K] of its weight's dtype, on its device, with any strides; the result is contiguous.
    - x of another dtype, as within `torch.autocast`, goes to the class's own forward. So does x or
      a weight that requires a gradient, while gradients are enabled: the op has no backward pass.

    The op rounds its result once; transformers' norms mostly round x / rms to 16 bits before they
    multiply by the weight, so that bits differ.

    On a Hopper GPU a replaced norm is one kernel, which the trial compiles where it is not yet.

    Args:
        model: of transformers, or any other module.

    Returns:
        The names of the submodules that this call replaced, in the order of `named_modules`.

    Raises:
        KernelError: when the op's kernel is not compiled and can not be compiled now.
        TypeError: when `model` is no module; by a replaced norm, for a dtype that the op lacks.
        ValueError: by a replaced norm, for a shape or device that does not go with the weight's.
    """
    return replace_forwards(model, _forward_of)


def _forward_of(module: torch.nn.Module) -> Forward | None:
    """Return a norm's new forward, None for one that is left as it is."""
    return _forward if _looks_like_a_norm(module) and _computes_the_op(module) else None


def _forward(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] normalised by the op, or by the norm's class for what the op is not for."""
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if wants_gradient or x.dtype != weight.dtype:
        result: torch.Tensor = type(norm).forward(norm, x)
        return result
    rows = x.reshape(-1, x.size(-1))
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    normed = ops.rms_norm(rows, weight, _eps(norm))
    assert isinstance(normed, torch.Tensor), "there is no residual"
    return normed.view(x.shape)


def _eps(norm: torch.nn.Module) -> float:
    """Return a norm's eps, NaN for a module that has none."""
    for name in _EPS_NAMES:
        if isinstance(eps := getattr(norm, name, None), float | int):
            return eps
    return math.nan


def _looks_like_a_norm(module: torch.nn.Module) -> bool:
    """Return whether a module has the parts of an RMS norm."""
    weight = getattr(module, "weight", None)
    return (
        "RMSNorm" in type(module).__name__
        and type(weight) is torch.nn.Parameter  # not a subclass, such as DTensor
        and weight.ndim == 1
        and len(signature(type(module).forward).parameters) == 2
        and not math.isnan(_eps(module))
    )


@torch.no_grad()
def _computes_the_op(norm: torch.nn.Module) -> bool:
    """Return whether a norm gives what the op does, for random x [2, 3, K] and a random weight."""
    weight, eps = norm.weight, _eps(norm)
    assert isinstance(weight, torch.Tensor)
    generator = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    drawn = torch.randn(
        7, weight.size(0), generator=generator, dtype=torch.float32, device="cpu"
    ).add_(0.5)  # a mean, so that norms that subtract it differ
    # Of one row in three the mean of squares is about as large as eps.
    drawn[1::3] *= max(eps, 1e-6) ** 0.5
    other, x = drawn[0].to(weight), drawn[1:].to(weight).view(2, 3, -1)
    # Theirs may round to this dtype twice, and sum fp32 in another order.
    rtol = max(2 * torch.finfo(weight.dtype).eps, 1e-5)

    # A copy with parameters of its own: those of compressed-tensors are no dict, and write what is
    # assigned into the tensors that are there.
    tried = copy.copy(norm)
    vars(tried)["_parameters"] = {"weight": torch.nn.Parameter(other, requires_grad=False)}

    def trial() -> bool:
        theirs = type(norm).forward(tried, x)
        ours = ops.rms_norm(x.view(6, -1), other, eps)
        assert isinstance(ours, torch.Tensor), "there is no residual"
        ours = ours.view(x.shape)
        return (
            theirs.dtype is ours.dtype
            and theirs.shape == ours.shape
            and torch.allclose(theirs.float(), ours.float(), rtol=rtol, atol=rtol / 1000)
        )

    return is_known_to_agree(trial)
