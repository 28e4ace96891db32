"""Linear layers y = x·Wᵀ + b: 16/32-bit, and W8A8 with INT8 or FP8 operands."""

from __future__ import annotations

import torch

from ...jit.targets import capability_of
from ..common import checks
from ..common.batch_invariant_rows import in_row_blocks
from ..common.device import has_kernel
from ..common.precision import full_precision
from ..common.sizes import ceil_div
from ..common.torch_library import register
from . import cpu_product, packed_weight
from .dense_gemm import dense_gemm
from .gemm_variants import GemmTiled
from .packed_weight import PackedWeight, check_features, data_of
from .w8a8_gemm import ToSample, w8a8_gemm
from .w8a8_torch import fp8_product, int8_product

DTYPES_16_BIT = (torch.bfloat16, torch.float16)


def linear(
    x: torch.Tensor,
    w: torch.Tensor | PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Multiply x by wᵀ and add `bias`, with fp32 accumulation, rounded once.

    A row of the result has the same bits whatever other rows are in the call.

    With 16-bit operands this is one launch of a kernel on a Hopper GPU, compiled on first use; fp32
    ones, and other GPUs, multiply by torch's operators. The kernel is at its fastest with a
    `PackedWeight`: then w and bias are constants, which the kernel may read while kernels before it
    on the stream are still running, so none of those may write them. A plain w is read as it lies
    if it and its rows are aligned to 16 bytes, and otherwise packed for the call; x is copied if it
    or its rows are not so aligned.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        w: [N, K] of x's dtype, plain or, in 16 bits, packed (`pack_weight`); where there is no
            kernel, a packed one is unpacked at every call.
        bias: [N] of x's dtype or of `out_dtype`.
        n_active: int32 [1], how many rows of x are real: those after them are padding, whose
            results mean nothing, and which a kernel may leave unread. On CUDA it is read early, as
            a packed w is.
        out_dtype: x's dtype, or fp32; None for x's.
        out: [M, N] of `out_dtype`, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", "K"))
    device = x.device
    out_dtype = x.dtype if out_dtype is None else out_dtype
    shape = check_dense_weight(w, x, bias, out_dtype)
    checks.active(n_active, device)
    if out is not None:
        checks.output("out", out, (out_dtype,), shape, device)
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty(shape, dtype=out_dtype, device=device)
        _linear_op(x, data_of(w), bias, n_active, out)
    return out


def check_dense_weight(
    w: torch.Tensor | PackedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[int, int]:
    """Check what belongs to the weight of `linear` for x [M, K], and return [M, N]."""
    check_features("w", w, x.size(1), (x.dtype,), x.device)
    check_tiles(x.shape, w.shape)
    checks.int32_sizes("x", (x.size(1) * x.itemsize,), "bytes of K")
    dtypes = tuple(dict.fromkeys((x.dtype, torch.float32)))
    checks.option("out_dtype", out_dtype, dtypes)
    if bias is not None:
        dtypes = tuple(dict.fromkeys((x.dtype, out_dtype)))
        checks.tensor("bias", bias, dtypes, (w.shape[0],), x.device)
    return x.size(0), w.shape[0]


def w8a8_linear(
    x: torch.Tensor,
    w: torch.Tensor | PackedWeight,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    x_zero_point: torch.Tensor | None = None,
    w_sum: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
    batch_invariant: bool = False,
    check_scales: bool = False,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Multiply 8-bit x by 8-bit wᵀ and scale: y = x_scale · (w_scale · acc) + bias.

    acc = x·wᵀ is exact (int32) for int8, for which K is at most 131071, and a sum in fp32 for e4m3.
    With `x_zero_point`, acc is x·wᵀ - x_zero_point · w_sum, for K of at most 65793. The epilogue is
    fp32, rounded once.

    On a Hopper GPU this is one launch of a kernel, compiled on first use; other GPUs multiply by
    torch's operators (`ostinato.ops.linear.w8a8_torch`). The kernel is at its fastest with a
    `PackedWeight`: then w, w_scale, w_sum and bias are constants, which the kernel may read while
    kernels before it on the stream are still running, so none of those may write them. A plain w is
    read as it lies if it and its rows are aligned to 16 bytes, and otherwise packed for the call; x
    is copied if it or its rows are not so aligned.

    Args:
        x: [M, K] int8 or float8_e4m3fn.
        w: [N, K] of x's dtype, plain or packed (`pack_weight`); the CPU unpacks it at every call.
        x_scale: fp32, [M] per token or a scalar (0-d or [1]).
        w_scale: fp32, [N] per output channel or a scalar.
        bias: [N] of `out_dtype`, or fp32, which is rounded to `out_dtype` first.
        x_zero_point: int32 in -128 .. 127, [M] or a scalar, int8 only: asymmetric activations.
            Another scalar is refused on the CPU, any other number with `check_scales`.
        w_sum: [N] int32, the row sums of w; computed when None and needed.
        n_active: int32 [1], how many rows of x are real: those after them are padding, whose
            results mean nothing, and which a kernel may leave unread. On CUDA it is read while
            kernels before this one are still running, as what belongs to a `PackedWeight` is, so
            none of those may write it (docs/w8a8.md).
        out_dtype: bf16, fp16 or fp32.
        fast_accum: let e4m3 sums on CUDA stay in the tensor cores, which keep about 13 fraction
            bits of them. Without it they are added in fp32 every 128 products.
        batch_invariant: make the bits of a row of an e4m3 product on CUDA independent of the
            other rows, at the price of the faster kernel for up to 16 rows. int8 products and those
            on the CPU are so in any case.
        check_scales: for debugging: wait for the device, and refuse scales that are negative, NaN
            or infinite, and zero points out of range. Not possible while a stream is being
            captured.
        out: [M, N] of `out_dtype`, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.tensor("x", x, checks.QUANTIZED_DTYPES, ("M", "K"))
    checks.not_empty("x", x, "K")
    device, rows = x.device, x.size(0)
    columns = check_weight(w, x.shape, w_scale, bias, out_dtype, device, dtypes=(x.dtype,))
    weight = data_of(w)
    checks.scalar_or_vector("x_scale", x_scale, torch.float32, rows, device)
    if x_zero_point is not None:
        if x.dtype is not torch.int8:
            raise ValueError(f"x_zero_point: got a tensor, expected None for {x.dtype}")
        checks.scalar_or_vector("x_zero_point", x_zero_point, torch.int32, rows, device)
        check_int32_sums(x.size(1), largest=255)
    if w_sum is not None:
        if x_zero_point is None:
            raise ValueError("w_sum: got a tensor, expected None without x_zero_point")
        checks.tensor("w_sum", w_sum, (torch.int32,), (columns,), device)
    checks.active(n_active, device)
    checks.flag("fast_accum", fast_accum)
    checks.flag("batch_invariant", batch_invariant)
    checks.flag("check_scales", check_scales)
    if out is not None:
        checks.output("out", out, (out_dtype,), (rows, columns), device)
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty((rows, columns), dtype=out_dtype, device=device)
        how = (fast_accum, batch_invariant, check_scales)
        _w8a8_linear_op(x, weight, x_scale, w_scale, bias, x_zero_point, w_sum, n_active, *how, out)
    return out


def check_weight(
    w: torch.Tensor | PackedWeight,
    x_shape: torch.Size,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = checks.QUANTIZED_DTYPES,
    *,
    prefix: str = "",
) -> int:
    """Check what belongs to the weight of a W8A8 layer for x [M, K], and return its N.

    What messages call w, w_scale and bias begins with `prefix`.
    """
    k, name = x_shape[1], f"{prefix}w"
    check_features(name, w, k, dtypes, device)
    columns = w.shape[0]
    check_tiles(x_shape, w.shape)
    if w.dtype is torch.int8:
        check_int32_sums(k, largest=128)
    checks.scalar_or_vector(f"{name}_scale", w_scale, torch.float32, columns, device)
    checks.option("out_dtype", out_dtype, checks.FLOAT_DTYPES)
    if bias is not None:
        checks.tensor(f"{prefix}bias", bias, (out_dtype, torch.float32), (columns,), device)
    return columns


def dense_multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    n_active: torch.Tensor | None,
    out: torch.Tensor,
    to_sample: ToSample | None = None,
) -> None:
    """Do `linear` with checked arguments; w is [N, K] or the data of a `PackedWeight`.

    `to_sample` is for GPUs with kernels alone.
    """
    if runs_dense_kernel(x):
        dense_gemm(x, w, bias, n_active, out, to_sample)
        return
    if w.dim() == 4:
        w = packed_weight.unpack(w, out.size(1), x.size(1))
    if x.device.type == "cpu":
        cpu_product.float_product(x, w, bias, out)
        return

    if x.dtype is torch.float32:
        full_precision(x.device)

    def product(block: torch.Tensor) -> torch.Tensor:
        # Asking for fp32 keeps cuBLAS from adding the partial sums of a split K in 16 bits.
        if x.dtype is torch.float32:
            acc = torch.mm(block, w.t())
        else:
            acc = torch.mm(block, w.t(), out_dtype=torch.float32)
        return acc if bias is None else acc + bias

    in_row_blocks(product, x, out)


def runs_dense_kernel(x: torch.Tensor) -> bool:
    """Return whether x, or a weight like it, is multiplied by the kernel for 16-bit operands."""
    return x.dtype in DTYPES_16_BIT and x.size(1) > 0 and has_kernel(GemmTiled, x)


def check_tiles(x_shape: torch.Size, w_shape: torch.Size) -> None:
    """Check that sizes and numbers of tiles fit the kernels' 32 bits, for the smallest of tiles."""
    checks.int32_sizes("x", x_shape, "M", "K")
    checks.int32_sizes("w", w_shape, "N", "K")
    tiles = ceil_div(x_shape[0], 16) * ceil_div(w_shape[0], 16)
    if tiles > checks.INT32_MAX:
        raise ValueError(
            f"x: got M = {x_shape[0]} with N = {w_shape[0]}, "
            f"expected at most {checks.INT32_MAX} tiles of 16 by 16"
        )


def check_int32_sums(k: int, *, largest: int) -> None:
    """Check that sums of k products of int8 weights and at most `largest` are exact in int32."""
    most = checks.INT32_MAX // (128 * largest)
    if k > most:
        raise ValueError(f"x: got K = {k}, expected at most {most}: int8 sums are of 32 bits")


def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_zero_point: torch.Tensor | None,
    w_sum: torch.Tensor | None,
    n_active: torch.Tensor | None,
    fast_accum: bool,
    batch_invariant: bool,
    check_scales: bool,
    out: torch.Tensor,
    to_sample: ToSample | None = None,
) -> None:
    """Do `w8a8_linear` with checked arguments; w is [N, K] or the data of a `PackedWeight`.

    `to_sample` is for GPUs with kernels alone.
    """
    if check_scales:
        checks.positive_scale("x_scale", x_scale, or_zero=True)
        checks.positive_scale("w_scale", w_scale, or_zero=True)
    checks.zero_points("x_zero_point", x_zero_point, wait=check_scales)
    if has_kernel(GemmTiled, x):
        how = (fast_accum, batch_invariant)
        operands = (x, w, x_scale, w_scale, bias, x_zero_point, w_sum, n_active)
        w8a8_gemm(*operands, *how, out, to_sample)
        return
    if out.numel() == 0:
        return
    if w.dim() == 4:
        w = packed_weight.unpack(w, out.size(1), x.size(1))
    if x.dtype is torch.int8:
        acc = int8_product(x, w) if x.is_cuda else cpu_product.int8_product(x, w)
        if x_zero_point is not None:
            if w_sum is None:
                w_sum = packed_weight.channel_sums(w, out.size(1))
            acc = acc - x_zero_point.reshape(-1, 1) * w_sum
        acc = acc.float()
    elif x.is_cuda:
        acc = fp8_product(x, w, fast_accum, capability_of(x.get_device()))
    else:
        acc = torch.empty(out.shape, dtype=torch.float32, device=x.device)
        cpu_product.float_product(x, w, None, acc)
    scaled = acc.mul_(w_scale).mul_(x_scale.reshape(-1, 1))
    out.copy_(scaled if bias is None else scaled.add_(bias.to(out.dtype)))


_linear_op = register(
    "linear(Tensor x, Tensor w, Tensor? bias, Tensor? n_active, Tensor(a!) out) -> ()",
    dense_multiply,
)
_w8a8_linear_op = register(
    "w8a8_linear(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? bias, "
    "Tensor? x_zero_point, Tensor? w_sum, Tensor? n_active, bool fast_accum, "
    "bool batch_invariant, bool check_scales, Tensor(a!) out) -> ()",
    multiply,
)
