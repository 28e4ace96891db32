"""Products of the rows of each expert with its weight."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.sizes import ceil_div
from ..common.torch_library import register
from ..linear.block_scales import SCALE_CHANNELS, scale_channels
from ..linear.linear import check_int32_sums
from ..linear.packed_weight import WEIGHT_DTYPES
from ..linear.quantize import quantize_per_token
from ..linear.quantize_cuda import GROUP
from ..linear.quantize_groups import quantize_per_group
from .moe_linear_cuda import MoeLinear, moe_gemm, quantizes_rows
from .moe_linear_torch import multiply_rows
from .packed_experts import PackedExperts
from .plan import MoePlan, check_plan

DESTINATIONS = ("experts", "slots")


def moe_linear(
    x: torch.Tensor,
    w: torch.Tensor | PackedExperts,
    plan: MoePlan,
    *,
    to: str,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
    n_active: torch.Tensor | None = None,
    early: bool = False,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Multiply the rows of each expert by its weight: y = act(x·wᵀ), scaled as w is quantised.

    There are two directions. `to="experts"`, the first product of a block, reads tokens and writes
    the rows of experts: out[r] = act(x[token of row r] · w[expert of row r]ᵀ). `to="slots"`, the
    second, reads those rows and writes slots: out[token, j] = act(x[r] · w[...]ᵀ) for the row r of
    the token's j-th expert. What has no expert is not written: rows from `plan.n_rows` on, and
    slots whose `plan.ids` is -1.

    Sums, scales and activation are in fp32, rounded once; sums of int8 are exact, for K of at most
    131071. A row has the same bits whatever other rows there are. The weights of an expert without
    rows are not read.

    x of 16 or 32 bits beside w of 8 is quantised first, with the bits of `quantize_per_token` or,
    where w has scales of blocks, of `quantize_per_group`.

    On a Hopper GPU this is one launch of a kernel, compiled on first use; elsewhere torch's
    operators multiply. The kernel quantises x itself where few tokens are routed and K is small;
    otherwise that is a launch before it. The kernel is at its fastest with `PackedExperts`, which
    are constants. A plain w is packed for the call, and x copied unless it and its rows are aligned
    to 16 bytes.

    Args:
        x: of w's dtype, int8, float8_e4m3fn, bf16, fp16 or fp32: [T, K] for `to="experts"`,
            otherwise [T·top_k, K]. In fp32 torch's operators multiply. Beside int8 or e4m3 w also
            bf16, fp16 or fp32.
        w: [experts, N, K], plain or packed (`pack_experts`), with `gated` if there is an
            activation.
        plan: of `moe_route`, for T tokens.
        to: "experts" or "slots".
        x_scale: fp32, for 8-bit x: [rows of x], a scale of each, or for e4m3
            [ceil(K / 128), rows of x], a scale of each group of 128 of K (`quantize_per_group`).
        w_scale: fp32, for 8-bit w: [experts, N], or with groups those of `channel_scales`
            for each expert: [experts, ceil(K / 128), ceil(N / s)], s 8 or 128. Of w = [gate | up],
            N / 2 is then a multiple of s.
        activation: None, or "silu_mul" for w = [gate | up] along N: silu(gate) · up, N / 2 wide.
        out_dtype: bf16, fp16 or fp32; None for x's, and for bf16 with 8-bit x. With 16-bit w, x's
            dtype or fp32.
        power_of_two: of x that is quantised by groups here: as of `quantize_per_group`.
        n_active: int32 [1], how many rows of x are real, of x that is quantised here: as of
            `quantize_per_token`, and for `to="slots"` `plan.n_rows`.
        early: let a kernel read the plan, packed weights and w_scale while the one before it on the
            stream is still running, which must not write them then: it is to be the first product,
            or what quantises its result, not `moe_route`.
        out: written and returned; [T·top_k, N or N / 2] of `out_dtype` for `to="experts"`,
            otherwise [T, top_k, N or N / 2] whose slots are dense; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is launched.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.tensor("x", x, (*WEIGHT_DTYPES, torch.float32), ("rows", "K"))
    device = x.device
    check_plan(plan, device)
    if to not in DESTINATIONS:
        raise ValueError(f"to: got {to!r}, expected 'experts' or 'slots'")
    if activation not in (None, "silu_mul"):
        raise ValueError(f"activation: got {activation!r}, expected None or 'silu_mul'")
    slots = plan.tokens * plan.top_k
    rows = plan.tokens if to == "experts" else slots
    if x.size(0) != rows:
        raise ValueError(
            f"x: got {x.size(0)} rows, expected {rows}, those of a plan for {plan.tokens} tokens"
        )
    gated = activation is not None
    operand = _operand_dtype(x, w)
    channels = _check_weight(x, w, operand, plan, gated)
    _check_scales(x, operand, x_scale, w_scale, plan.experts, channels, gated)
    out_dtype = _out_dtype(x.dtype, operand, out_dtype)
    checks.flag("early", early)
    checks.flag("power_of_two", power_of_two)
    if power_of_two and (x.dtype is operand or w_scale is None or w_scale.dim() == 2):
        raise ValueError(
            "power_of_two: got True, expected False where x is not quantised by groups"
        )
    checks.active(n_active, device)
    width = channels // 2 if gated else channels
    shape = (slots, width) if to == "experts" else (plan.tokens, plan.top_k, width)
    if out is not None:
        checks.output("out", out, (out_dtype,), shape, device)
        if out.dim() == 3 and out.stride(0) != plan.top_k * out.stride(1) and plan.tokens > 1:
            raise ValueError(f"out: got strides {list(out.stride())}, expected dense slots")
    with checks.launch_stream(stream, device):
        if out is None:
            out = torch.empty(shape, dtype=out_dtype, device=device)
        weight = w.data if isinstance(w, PackedExperts) else w
        _op(
            *(x, weight, x_scale, w_scale, channels, to == "experts", gated, early),
            *(power_of_two, n_active),
            *(plan.ids, plan.rows, plan.offsets, plan.tiles, plan.n_tiles, plan.tile_tokens),
            out,
        )
    return out


def _operand_dtype(x: torch.Tensor, w: torch.Tensor | PackedExperts) -> torch.dtype:
    """Return the dtype in which x is multiplied: its own, or w's of 8 bits."""
    floats = x.dtype in checks.FLOAT_DTYPES
    known = floats and isinstance(w, torch.Tensor | PackedExperts)
    return w.dtype if known and w.dtype in checks.QUANTIZED_DTYPES else x.dtype


def _out_dtype(
    dtype: torch.dtype, operand: torch.dtype, out_dtype: torch.dtype | None
) -> torch.dtype:
    if out_dtype is None:
        return torch.bfloat16 if dtype in checks.QUANTIZED_DTYPES else dtype
    quantized = operand in checks.QUANTIZED_DTYPES
    allowed = checks.FLOAT_DTYPES if quantized else (dtype, torch.float32)
    checks.option("out_dtype", out_dtype, allowed)
    return out_dtype


def _check_weight(
    x: torch.Tensor,
    w: torch.Tensor | PackedExperts,
    operand: torch.dtype,
    plan: MoePlan,
    gated: bool,
) -> int:
    """Check w beside x and a plan; return its channels."""
    if isinstance(w, PackedExperts):
        if (w.experts, w.k) != (plan.experts, x.size(1)):
            raise ValueError(
                f"w: got shape {list(w.shape)}, expected [{plan.experts}, N, {x.size(1)}]"
            )
        if w.gated != gated:
            raise ValueError(
                f"w: got gated = {w.gated}, expected {gated} with "
                f"activation = {'silu_mul' if gated else None!r}"
            )
        checks.tensor("w", w.data, (operand,), w.data.shape, x.device)
    else:
        checks.tensor("w", w, (operand,), (plan.experts, "N", x.size(1)), x.device)
        checks.not_empty("w", w, "experts", "N", "K")
        if gated and w.size(1) % 2:
            raise ValueError(f"w: got N = {w.size(1)}, expected an even number, of gate and up")
    checks.int32_sizes("w", w.shape, "experts", "N", "K")
    checks.int32_sizes("w", (plan.experts * w.shape[1],), "experts·N")
    if operand is torch.int8:
        check_int32_sums(x.size(1), largest=128)
    return w.shape[1]


def _check_scales(
    x: torch.Tensor,
    operand: torch.dtype,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    experts: int,
    channels: int,
    gated: bool,
) -> None:
    if operand not in checks.QUANTIZED_DTYPES:
        for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
            if scale is not None:
                raise ValueError(f"{name}: got a tensor, expected None for {x.dtype}")
        return
    quantizes = x.dtype is not operand
    if quantizes and x_scale is not None:
        raise ValueError(f"x_scale: got a tensor, expected None for x of {x.dtype}")
    if w_scale is None or (x_scale is None and not quantizes):
        name = "w_scale" if quantizes or x_scale is not None else "x_scale"
        raise ValueError(f"{name}: got None, expected a tensor for {operand}")
    fp32, (rows, k) = (torch.float32,), x.shape
    by_rows = w_scale.dim() == 2 if x_scale is None else x_scale.dim() == 1
    if operand is torch.int8 or by_rows:
        if x_scale is not None:
            checks.tensor("x_scale", x_scale, fp32, (rows,), x.device)
        checks.tensor("w_scale", w_scale, fp32, (experts, channels), x.device)
        return
    groups = ceil_div(k, GROUP)
    if x_scale is not None:
        checks.tensor("x_scale", x_scale, fp32, (groups, rows), x.device)
    shape = (experts, groups, "scales of channels")
    checks.tensor("w_scale", w_scale, fp32, shape, x.device)
    scaled = [ceil_div(channels, shared) for shared in (SCALE_CHANNELS, GROUP)]
    if w_scale.size(2) not in scaled:
        raise ValueError(
            f"w_scale: got shape {list(w_scale.shape)}, expected {[experts, groups, scaled[0]]} "
            f"or {[experts, groups, scaled[1]]}"
        )
    shared = scale_channels(w_scale[0], channels)
    if gated and channels // 2 % shared:
        raise ValueError(
            f"w: got {channels // 2} channels of the gate with scales of blocks, "
            f"expected a multiple of {shared}"
        )


def runs_experts_kernel(x: torch.Tensor) -> bool:
    """Return whether operands like x are multiplied by the kernel of grouped products."""
    return x.dtype is not torch.float32 and has_kernel(MoeLinear, x)


def _moe_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    channels: int,
    to_experts: bool,
    gated: bool,
    early: bool,
    power_of_two: bool,
    n_active: torch.Tensor | None,
    ids: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    n_tiles: torch.Tensor,
    tile_tokens: int,
    out: torch.Tensor,
) -> None:
    if out.numel() == 0:
        return
    kernel = runs_experts_kernel(w)
    experts = offsets.size(0) - 1
    in_product = kernel and quantizes_rows(x, out.dtype, ids.numel(), experts, tile_tokens)
    if x.dtype is not w.dtype and not in_product:
        if w_scale is not None and w_scale.dim() == 3:
            x, x_scale = quantize_per_group(x, power_of_two=power_of_two, n_active=n_active)
        else:
            x, x_scale = quantize_per_token(x, w.dtype, n_active=n_active)
    if kernel:
        how = (channels, to_experts, gated, early, power_of_two, ids.size(1))
        moe_gemm(x, w, x_scale, w_scale, *how, rows, experts, tiles, n_tiles, tile_tokens, out)
        return
    multiply_rows(x, w, x_scale, w_scale, channels, to_experts, gated, ids, rows, offsets, out)


_op = register(
    "moe_linear(Tensor x, Tensor w, Tensor? x_scale, Tensor? w_scale, int channels, "
    "bool to_experts, bool gated, bool early, bool power_of_two, Tensor? n_active, Tensor ids, "
    "Tensor rows, Tensor offsets, Tensor tiles, Tensor n_tiles, int tile_tokens, "
    "Tensor(a!) out) -> ()",
    _moe_linear,
)
