"""The grouped GEMM on a GPU: bits that no delay and no size of a tile changes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from kernels_gemm import load

from ostinato import _C, ops
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.jit.variant import Variant
from ostinato.ops.moe.moe_linear_cuda import MoeLinear

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_SITES = ("weights", "tokens", "consumer", "release")
_QUANTIZING_SITES = ("quantized_rows", "row_scales")
_VARIANTS = (
    MoeLinear(dtype="int8", out_dtype="bf16", tokens=8),
    MoeLinear(dtype="bf16", out_dtype="bf16", tokens=32),
    MoeLinear(dtype="e4m3", out_dtype="bf16", tokens=16, block_scales=True, scale_channels=128),
    MoeLinear(dtype="e4m3", out_dtype="bf16", tokens=64, block_scales=True),
    MoeLinear(dtype="e4m3", out_dtype="bf16", tokens=64, block_scales=True, scale_channels=128),
    MoeLinear(dtype="e4m3", out_dtype="bf16", tokens=128, block_scales=True, scale_channels=128),
    MoeLinear(dtype="int8", out_dtype="bf16", tokens=128),
    MoeLinear(dtype="int8", out_dtype="bf16", tokens=8, x_dtype="bf16"),
    MoeLinear(
        dtype="e4m3",
        out_dtype="bf16",
        tokens=8,
        block_scales=True,
        scale_channels=128,
        x_dtype="bf16",
    ),
)
_DELAYS = tuple(
    (variant, BuildMode(delay_site=site))
    for variant in _VARIANTS
    for site in (*_SITES, *(_QUANTIZING_SITES if variant.x_dtype else ()))
)
# Whose CTAs can be in pairs.
_LARGE = tuple(
    MoeLinear(
        dtype=dtype,
        out_dtype="bf16",
        tokens=128,
        block_scales=channels > 0,
        scale_channels=channels or 8,
    )
    for dtype, channels in (("int8", 0), ("e4m3", 0), ("bf16", 0), ("e4m3", 8), ("e4m3", 128))
)
_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}

Libraries = dict[tuple[Variant, BuildMode], _C.Library]


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    return load([*_DELAYS, *((variant, RELEASE) for variant in {*_VARIANTS, *_LARGE})])


def _launch(
    library: _C.Library,
    variant: MoeLinear,
    plan: ops.MoePlan,
    tile_channels: int = 0,
    *,
    pairs: bool = False,
) -> torch.Tensor:
    """Return a gated product of operands that are the same at every call."""
    experts, k = plan.experts, 1504 if variant.x_dtype else 1500
    n = 1024 if variant.scale_channels == 128 else 1040
    generator = torch.Generator("cuda").manual_seed(1)
    x, w = (
        torch.randn(*shape, generator=generator, device="cuda")
        for shape in ((plan.tokens, k + 4), (experts, n, k))
    )
    if variant.dtype == "int8":
        x, w = x * 40, w * 40
    dtype = _DTYPES[variant.x_dtype or variant.dtype]
    x = x.to(dtype)[:, :k]
    packed = ops.pack_experts(w.to(_DTYPES[variant.dtype]), gated=True)
    groups = -(-k // 128)
    x_scale, w_scale = (
        torch.rand(size, generator=generator, device="cuda") / 100
        for size in (groups * plan.tokens, experts * groups * n)
    )
    padded = torch.zeros(plan.tokens, -(-k // 16) * 16, dtype=dtype, device="cuda")
    padded.view(torch.int8)[:, : k * x.itemsize].copy_(x.contiguous().view(torch.int8))
    out = torch.full((plan.rows.size(0), n // 2), 7.0, dtype=torch.bfloat16, device="cuda")
    scaled = variant.dtype != "bf16"
    library.launch(
        x=padded.data_ptr(),
        x_stride=padded.stride(0),
        w=packed.data.data_ptr(),
        x_scale=x_scale.data_ptr() if scaled and not variant.x_dtype else 0,
        x_scale_stride=plan.tokens,
        w_scale=w_scale.data_ptr() if scaled else 0,
        rows=plan.rows.data_ptr(),
        tiles=plan.tiles.data_ptr(),
        n_tiles=plan.n_tiles.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        experts=experts,
        n=n,
        k=k,
        top_k=plan.top_k,
        max_tiles=plan.tiles.size(0),
        to_experts=True,
        gated=True,
        tile_channels=tile_channels,
        pairs=pairs,
        pdl=True,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    return out


def _plan(variant: MoeLinear) -> ops.MoePlan:
    """Return a plan whose tiles have as many rows as the kernel's, some of them full."""
    experts, top_k = 16, 2
    tokens = {8: 24, 16: 64, 32: 100, 64: 200, 128: 700}[variant.tokens]
    plan = ops.moe_route(torch.randn(tokens, experts).cuda(), top_k)
    assert plan.tile_tokens == variant.tokens
    return plan


def _pairs(variant: MoeLinear) -> tuple[bool, ...]:
    return (False, True) if variant.tokens == 128 else (False,)


@pytest.mark.parametrize(
    ("variant", "mode"),
    _DELAYS,
    ids=[f"{variant.name}-{mode.delay_site}" for variant, mode in _DELAYS],
)
def test_injected_delays_change_no_bit(
    libraries: Libraries, mode: BuildMode, variant: MoeLinear
) -> None:
    plan = _plan(variant)
    expected = _launch(libraries[variant, RELEASE], variant, plan)
    delayed = libraries[variant, mode]
    for _, pairs in product(range(3), _pairs(variant)):
        assert torch.equal(_launch(delayed, variant, plan, pairs=pairs), expected), pairs


@pytest.mark.parametrize("variant", _VARIANTS, ids=lambda variant: variant.name)
def test_every_size_of_a_tile_gives_the_same_bits(libraries: Libraries, variant: MoeLinear) -> None:
    plan = _plan(variant)
    library = libraries[variant, RELEASE]
    expected = _launch(library, variant, plan)
    step = variant.channel_step
    for channels, pairs in product(range(step, variant.channels + 1, step), _pairs(variant)):
        got = _launch(library, variant, plan, channels, pairs=pairs)
        assert torch.equal(got, expected), (channels, pairs)


@pytest.mark.parametrize("variant", _LARGE, ids=lambda variant: variant.name)
@pytest.mark.parametrize("tokens", [600, 1700])
def test_pairs_of_ctas_give_the_same_bits(
    libraries: Libraries, tokens: int, variant: MoeLinear
) -> None:
    """All rows of few experts, or spread; a last tile alone, and pairs of two experts."""
    library = libraries[variant, RELEASE]
    for experts in (1, 2, 3, 16):
        logits = torch.randn(tokens, 16)
        logits[:, :experts] += 100
        plan = ops.moe_route(logits.cuda(), min(experts, 2))
        assert plan.tile_tokens == variant.tokens
        expected = _launch(library, variant, plan)
        for _ in range(3):
            assert torch.equal(_launch(library, variant, plan, pairs=True), expected), experts
