"""Sums over ranks together with what follows them: residual, RMS norm, and quantisation."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.sizes import ceil_div
from ..common.torch_library import register
from ..linear.block_scales import empty_scales
from ..linear.norms import check_norm, normalize_and_quantize, normalize_into
from ..linear.quantize import check_static, check_static_values
from ..linear.quantize_cuda import GROUP
from ..linear.quantize_groups import norm_quantize_per_group
from .communicator import Communicator, check_shared, communicator_of
from .peers import PeerCommunicator


def all_reduce_norm(
    x: torch.Tensor,
    communicator: Communicator,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `all_reduce`, then `rms_norm` with its result; the bits are the same.

    Between ranks with access to each other's memory this is one launch.

    Args:
        x: [T, H] bf16, fp16 or fp32, of the same shape and dtype on every rank.
        communicator: of this rank.
        weight: [H] of x's dtype or fp32, the norm's; on CUDA a constant, as of `rms_norm_quantize`.
        eps: added to the mean of squares, at least 0.
        residual: [T, H] of x's dtype, equal on all ranks: added to the sum over ranks, which is
            rounded to x's dtype before and after.
        n_active: int32 [1], equal on all ranks: how many rows are real. Results of the others mean
            nothing; on CUDA they are left out, and it is read while kernels before this one are
            still running, so none of those may write it.
        stream: see `ostinato.ops`.

    Returns:
        (the norm [T, H], the sum with the residual [T, H]), both of x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, before anything is sent.
        CommunicatorError: when a rank does not take part.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    _check(x, communicator, weight, eps, residual, n_active)
    with checks.launch_stream(stream, x.device):
        out, total = _like(x), _like(x)
        _all_reduce_norm_op(x, communicator.name, weight, eps, residual, out, total, n_active)
    return out, total


def all_reduce_norm_quantize(
    x: torch.Tensor,
    communicator: Communicator,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    check_scales: bool = False,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do `all_reduce`, then `rms_norm_quantize` with its result; the bits are the same.

    Between ranks with access to each other's memory this is one launch. The arguments are those of
    `all_reduce_norm` and of `rms_norm_quantize`.

    Returns:
        (values [T, H] of `dtype`, scale [T] fp32, the sum with the residual [T, H] of x's dtype).
        With `scale`, the second is the `scale_out` of `quantize_per_tensor`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is sent.
        CommunicatorError: when a rank does not take part.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.option("dtype", dtype, checks.QUANTIZED_DTYPES)
    _check(x, communicator, weight, eps, residual, n_active)
    check_static(scale, zero_point, dtype, x.device)
    checks.flag("check_scales", check_scales)
    with checks.launch_stream(stream, x.device):
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        scale_out = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        total = _like(x)
        static = (scale, zero_point, check_scales)
        outputs = (out, scale_out, total)
        _all_reduce_norm_quantize_op(
            x, communicator.name, weight, eps, residual, *static, *outputs, n_active
        )
    return outputs


def all_reduce_norm_quantize_per_group(
    x: torch.Tensor,
    communicator: Communicator,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    power_of_two: bool = False,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do `all_reduce`, then `rms_norm_quantize_per_group` with its result; the bits are the same.

    Between ranks with access to each other's memory this is one launch. The arguments are those of
    `all_reduce_norm` and of `rms_norm_quantize_per_group`.

    Returns:
        (values [T, H] e4m3, scale [ceil(H / 128), T] fp32, the sum with the residual [T, H] of x's
        dtype).

    Raises:
        TypeError, ValueError: naming the argument, before anything is sent.
        CommunicatorError: when a rank does not take part.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    _check(x, communicator, weight, eps, residual, n_active)
    checks.flag("power_of_two", power_of_two)
    with checks.launch_stream(stream, x.device):
        out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scale_out = empty_scales(ceil_div(x.size(1), GROUP), x.size(0), x.device)
        outputs = (out, scale_out, _like(x))
        _all_reduce_norm_quantize_per_group_op(
            x, communicator.name, weight, eps, residual, power_of_two, *outputs, n_active
        )
    return outputs


def _check(
    x: torch.Tensor,
    communicator: Communicator,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    n_active: torch.Tensor | None,
) -> None:
    check_shared(x, communicator)
    check_norm(x, weight, eps, residual)
    checks.active(n_active, x.device)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _summed(
    ranks: Communicator, x: torch.Tensor, residual: torch.Tensor | None, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum over ranks, and where its sum with the residual belongs.

    Without a residual the sum is in `total` already.
    """
    summed = total if residual is None else _like(x)
    ranks.reduce_into(summed, x)
    return summed, None if residual is None else total


def _all_reduce_norm(
    x: torch.Tensor,
    communicator: str,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor,
    n_active: torch.Tensor | None = None,
) -> None:
    if not x.numel():
        return
    ranks = communicator_of(communicator)
    given = (x, weight, eps, residual, out, total)
    if isinstance(ranks, PeerCommunicator) and ranks.norm_into(*given, n_active=n_active):
        return
    summed, total_out = _summed(ranks, x, residual, total)
    normalize_into("rms_norm", summed, weight, None, eps, residual, out, total_out)


def _all_reduce_norm_quantize(
    x: torch.Tensor,
    communicator: str,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    check_scales: bool,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    total: torch.Tensor,
    n_active: torch.Tensor | None = None,
) -> None:
    if not x.numel():
        return
    check_static_values(scale, zero_point, check_scales)
    ranks = communicator_of(communicator)
    given = (x, weight, eps, residual, out, total)
    if isinstance(ranks, PeerCommunicator) and ranks.norm_into(
        *given, scale=scale, zero_point=zero_point, scale_out=scale_out, n_active=n_active
    ):
        return
    summed, total_out = _summed(ranks, x, residual, total)
    static = (scale, zero_point, False)
    outputs = (out, scale_out, total_out)
    normalize_and_quantize(
        "rms_norm", summed, weight, None, eps, residual, *static, *outputs, n_active
    )


def _all_reduce_norm_quantize_per_group(
    x: torch.Tensor,
    communicator: str,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    power_of_two: bool,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    total: torch.Tensor,
    n_active: torch.Tensor | None = None,
) -> None:
    if not x.numel():
        return
    ranks = communicator_of(communicator)
    given = (x, weight, eps, residual, out, total)
    if isinstance(ranks, PeerCommunicator) and ranks.norm_into(
        *given, scale_out=scale_out, group=GROUP, power_of_two=power_of_two, n_active=n_active
    ):
        return
    summed, total_out = _summed(ranks, x, residual, total)
    outputs = (out, scale_out, total_out)
    norm_quantize_per_group(
        "rms_norm", summed, weight, None, eps, residual, power_of_two, *outputs, n_active
    )


_all_reduce_norm_op = register(
    "all_reduce_norm(Tensor x, str communicator, Tensor weight, float eps, Tensor? residual, "
    "Tensor(a!) out, Tensor(b!) total, Tensor? n_active=None) -> ()",
    _all_reduce_norm,
)
_all_reduce_norm_quantize_op = register(
    "all_reduce_norm_quantize(Tensor x, str communicator, Tensor weight, float eps, "
    "Tensor? residual, Tensor? scale, Tensor? zero_point, bool check_scales, Tensor(a!) out, "
    "Tensor(b!) scale_out, Tensor(c!) total, Tensor? n_active=None) -> ()",
    _all_reduce_norm_quantize,
)
_all_reduce_norm_quantize_per_group_op = register(
    "all_reduce_norm_quantize_per_group(Tensor x, str communicator, Tensor weight, float eps, "
    "Tensor? residual, bool power_of_two, Tensor(a!) out, Tensor(b!) scale_out, Tensor(c!) total, "
    "Tensor? n_active=None) -> ()",
    _all_reduce_norm_quantize_per_group,
)
