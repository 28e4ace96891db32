"""Linear layers with FP8 operands that have a scale for each 128 of K."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.e4m3 import to_float32
from ..common.sizes import ceil_div
from ..common.torch_library import register
from . import packed_weight
from .block_scales import SCALE_CHANNELS, scale_channels
from .gemm_variants import GemmTiled
from .linear import check_tiles, linear
from .packed_weight import PackedWeight, check_features, data_of
from .quantize_cuda import GROUP
from .w8a8_gemm import w8a8_gemm

_E4M3 = torch.float8_e4m3fn


def fp8_block_linear(
    x: torch.Tensor,
    w: torch.Tensor | PackedWeight,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Multiply FP8 x by FP8 wᵀ, with scales of groups of K, and add a bias.

    y = Σ over groups g of 128 of K: x_scale[g] · w_scale[g] · (x[g]·w[g]ᵀ), + bias. The sum over a
    group and the sum of groups are in fp32, rounded once at the end.

    On a Hopper GPU this is one launch of a kernel, compiled on first use; other GPUs multiply by
    torch's operators, in fp32. What `w8a8_linear` says of packed weights and their constants holds
    here, too.

    Args:
        x: [M, K] float8_e4m3fn, as `quantize_per_group` makes it.
        w: [N, K] float8_e4m3fn, plain or packed (`pack_weight`).
        x_scale: fp32 [ceil(K / 128), M], a scale of each group of a token; copied unless its rows
            begin at multiples of 16 bytes.
        w_scale: fp32 [ceil(K / 128), ceil(N / 128)], a scale of each 128 channels, or
            [ceil(K / 128), ceil(N / 8)], of each 8, likewise (`channel_scales` makes either of
            blocks of 128 by 128).
        bias: [N] of `out_dtype`, or fp32, which is rounded to `out_dtype` first.
        n_active: as of `w8a8_linear`.
        out_dtype: bf16, fp16 or fp32.
        batch_invariant: make the bits of a row on CUDA independent of the other rows: K is then
            never divided among CTAs. On the CPU they are so in any case.
        out: [M, N] of `out_dtype`, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.tensor("x", x, (_E4M3,), ("M", "K"))
    checks.not_empty("x", x, "K")
    device, (rows, k) = x.device, x.shape
    check_features("w", w, k, (_E4M3,), device)
    columns, groups = w.shape[0], ceil_div(k, GROUP)
    check_tiles(x.shape, w.shape)
    checks.tensor("x_scale", x_scale, (torch.float32,), (groups, rows), device)
    scaled = [ceil_div(columns, channels) for channels in (SCALE_CHANNELS, GROUP)]
    checks.tensor("w_scale", w_scale, (torch.float32,), (groups, "scales of channels"), device)
    if w_scale.size(1) not in scaled:
        raise ValueError(
            f"w_scale: got shape {list(w_scale.shape)}, expected [{groups}, {scaled[0]}] or "
            f"[{groups}, {scaled[1]}]"
        )
    checks.option("out_dtype", out_dtype, checks.FLOAT_DTYPES)
    if bias is not None:
        checks.tensor("bias", bias, (out_dtype, torch.float32), (columns,), device)
    checks.active(n_active, device)
    checks.flag("batch_invariant", batch_invariant)
    if out is not None:
        checks.output("out", out, (out_dtype,), (rows, columns), device)
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty((rows, columns), dtype=out_dtype, device=device)
        _fp8_block_linear_op(x, data_of(w), x_scale, w_scale, bias, n_active, batch_invariant, out)
    return out


def _fp8_block_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n_active: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
) -> None:
    if has_kernel(GemmTiled, x):
        operands = (x, w, x_scale, w_scale, bias, None, None, n_active)
        w8a8_gemm(*operands, False, batch_invariant, out, block_scales=True)
        return
    if out.numel() == 0:
        return
    columns = out.size(1)
    if w.dim() == 4:
        w = packed_weight.unpack(w, columns, x.size(1))
    shared = scale_channels(w_scale, columns)
    of_channels = w_scale.t().repeat_interleave(shared, 0)[:columns]
    wide = linear(dequantized(x, x_scale.t()), dequantized(w, of_channels))
    out.copy_(wide if bias is None else wide + bias.to(out.dtype))


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return codes [rows, K] times scales [rows, ceil(K / 128)], in fp32."""
    wide = to_float32(codes)
    whole = wide.size(1) // GROUP * GROUP
    by_group = wide[:, :whole].view(wide.size(0), -1, GROUP)
    by_group *= scales[:, : whole // GROUP].unsqueeze(2)
    wide[:, whole:] *= scales[:, whole // GROUP :]
    return wide


_fp8_block_linear_op = register(
    "fp8_block_linear(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? bias, "
    "Tensor? n_active, bool batch_invariant, Tensor(a!) out) -> ()",
    _fp8_block_linear,
)
