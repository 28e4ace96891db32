"""The tiled GEMM with 16-bit operands: exact sums in every cut, and one order of summation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_gemm import load, multiply_16_bit

from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.linear.gemm_variants import DTYPES_16_BIT, GEMM_TILED, GemmTiled

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_VARIANTS = [v for v in GEMM_TILED if v.dtype in DTYPES_16_BIT]
_BF16 = [v for v in _VARIANTS if v.dtype == "bf16"]
_WIDE = GemmTiled(dtype="bf16", out_dtype="bf16", channels=128, tokens=256)
_SITES = (
    *("tokens", "weights", "consumer", "release"),
    *("epilogue_transpose", "epilogue_store"),
)
_LATE = tuple(
    GemmTiled(dtype="bf16", out_dtype="bf16", channels=channels, tokens=tokens, pingpong=pingpong)
    for channels, tokens, pingpong in (
        *((64, 8, False), (128, 32, False), (128, 128, False), (128, 128, True)),
    )
)
_CUTS: tuple[dict[str, int], ...] = (
    {},
    {"tile_channels": 48},
    {"tile_tokens": 7},
    {"cluster": 2},
    {"cluster": 2, "tile_channels": 16, "tile_tokens": 5},
    {"cluster": 2, "band": 3},
    {"cluster": 2, "share_weights": 1},
    {"cluster": 2, "share_weights": 1, "tile_channels": 48, "tile_tokens": 6},
    {"band": 2, "tile_channels": 32},
)

Launch = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def launch() -> Launch:
    """Give a function of variant, mode, operands, bias and cut that returns out."""
    wanted: list[tuple[GemmTiled, BuildMode]] = [(v, RELEASE) for v in _VARIANTS]
    wanted += [(v, BuildMode(delay_site=site)) for v in _LATE for site in _SITES]
    libraries = load(wanted)

    def run(
        variant: GemmTiled,
        mode: BuildMode,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor,
        **cut: Any,
    ) -> torch.Tensor:
        return multiply_16_bit(libraries[variant, mode], x, w, bias, **cut)

    return run


def signs(m: int, n: int, k: int, variant: GemmTiled) -> tuple[torch.Tensor, ...]:
    """Return x [m, k] and w [n, k] of -1, 0 and 1, and a bias [n]: their sums are exact."""
    dtype, out = _DTYPES[variant.dtype], _DTYPES[variant.out_dtype]
    x, w = (torch.randint(-1, 2, (rows, k), device="cuda").to(dtype) for rows in (m, n))
    return x, w, torch.randint(-9, 10, (n,), device="cuda").to(out)


def exact(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the product as it must come: exact sums, rounded once."""
    return (x.double() @ w.double().t() + bias.double()).float().to(bias.dtype)


@pytest.mark.parametrize("variant", _VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 200, 256), (70, 1003, 520), (333, 520, 72)])
def test_every_cut_gives_exact_sums(
    launch: Launch, variant: GemmTiled, m: int, n: int, k: int
) -> None:
    operands = signs(m, n, k, variant)
    expected = exact(*operands)
    for cut in _CUTS:
        got = launch(variant, RELEASE, *operands, **cut)
        assert torch.equal(got, expected), cut


@pytest.mark.parametrize("variant", _BF16, ids=lambda variant: variant.name)
@pytest.mark.parametrize("channels", [16, 64, 80, 112, 128])
def test_tiles_that_end_within_the_compiled_one(
    launch: Launch, variant: GemmTiled, channels: int
) -> None:
    if channels > variant.channels:
        pytest.skip("the kernel's tile is smaller")
    for m in (5, 49, 80, 333):
        operands = signs(m, 1600, 136, variant)
        for cluster in (1, 2):
            got = launch(variant, RELEASE, *operands, tile_channels=channels, cluster=cluster)
            assert torch.equal(got, exact(*operands)), (m, cluster)


# Of K fewer steps, as many, and more than a tile has chunks to store.
@pytest.mark.parametrize("k", [56, 128, 448, 512, 704])
def test_tiles_stored_while_the_next_is_summed(launch: Launch, k: int) -> None:
    operands = signs(1500, 6400, k, _WIDE)
    for cut in (
        {"tile_channels": 64, "tile_tokens": 96},
        {"tile_channels": 128, "tile_tokens": 160, "cluster": 2, "share_weights": 1},
        {"tile_channels": 64, "tile_tokens": 90, "cluster": 2},
    ):
        for _ in range(3):
            assert torch.equal(launch(_WIDE, RELEASE, *operands, **cut), exact(*operands)), cut


@pytest.mark.parametrize(("dtype", "out_dtype"), [("bf16", "bf16"), ("fp16", "fp32")])
def test_every_tile_gives_the_same_bits_every_time(
    launch: Launch, dtype: str, out_dtype: str
) -> None:
    x, w = (torch.randn(rows, 4096, device="cuda").to(_DTYPES[dtype]) for rows in (513, 4000))
    bias = torch.randn(4000, device="cuda").to(_DTYPES[out_dtype])
    variants = [v for v in _VARIANTS if (v.dtype, v.out_dtype) == (dtype, out_dtype)]
    expected = launch(variants[0], RELEASE, x, w, bias)
    cuts = ({"cluster": 1}, {"cluster": 2}, {"cluster": 2, "share_weights": 1})
    for variant in variants:
        for cut in (*cuts * 10, {"tile_channels": 48, "tile_tokens": min(37, variant.tokens)}):
            assert torch.equal(launch(variant, RELEASE, x, w, bias, **cut), expected), (
                variant,
                cut,
            )


@pytest.mark.parametrize("variant", _VARIANTS, ids=lambda variant: variant.name)
def test_sums_are_those_of_fp32(launch: Launch, variant: GemmTiled) -> None:
    for k in (64, 1000, 4096):
        x, w = (torch.randn(rows, k, device="cuda").to(_DTYPES[variant.dtype]) for rows in (70, 99))
        bias = torch.randn(99, device="cuda").to(_DTYPES[variant.out_dtype])
        sums = x.double() @ w.double().t() + bias.double()
        sizes = x.double().abs() @ w.double().abs().t() + bias.double().abs()
        # Tensor cores round toward zero as they add: less than an ulp of 2^-22 for each MMA.
        allowed = sizes * 2.0**-22 * (1 + k / 64)
        allowed = allowed + sums.abs() * torch.finfo(bias.dtype).eps
        error = (launch(variant, RELEASE, x, w, bias).double() - sums).abs()
        assert (error <= allowed).all(), (k, float((error / allowed).amax()))


@pytest.mark.parametrize("variant", _LATE, ids=lambda variant: variant.name)
@pytest.mark.parametrize("site", _SITES)
def test_injected_delays_change_no_bit(launch: Launch, site: str, variant: GemmTiled) -> None:
    operands = signs({8: 7, 32: 30}.get(variant.tokens, 300), 2000, 744, variant)
    for cut in ({}, {"cluster": 2, "tile_channels": 32}, {"cluster": 2, "share_weights": 1}):
        for _ in range(3):
            got = launch(variant, BuildMode(delay_site=site), *operands, **cut)
            assert torch.equal(got, exact(*operands)), cut


def test_a_thousand_launches_give_the_same_bits(launch: Launch) -> None:
    x, w = (torch.randn(rows, 2048, device="cuda").bfloat16() for rows in (24, 1003))
    bias = torch.randn(1003, device="cuda").bfloat16()
    variant = next(v for v in _BF16 if (v.tokens, v.out_dtype) == (32, "bf16"))
    expected = launch(variant, RELEASE, x, w, bias)
    for _ in range(1000):
        assert torch.equal(launch(variant, RELEASE, x, w, bias), expected)


def test_zero_points_are_refused(launch: Launch) -> None:
    operands = signs(8, 64, 64, _LATE[0])
    zeros = torch.zeros(8, dtype=torch.int32, device="cuda").data_ptr()
    with pytest.raises(RuntimeError, match="invalid argument"):
        launch(_LATE[0], RELEASE, *operands, x_zero_point=zeros)
