"""The best of each row as the tiled GEMM hands it over, in every cut of the output."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from kernels_gemm import launch, load, random_codes

from ostinato import _C, ops
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.linear.gemm_variants import GemmTiled

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_TILES = ((128, 32), (64, 64), (160, 64), (96, 128), (224, 128), (256, 128))
_VARIANTS = {
    (tile, dtype): GemmTiled(dtype=dtype, out_dtype="fp32", channels=tile[0], tokens=tile[1])
    for tile, dtype in product(_TILES, ("int8", "bf16"))
}
_LATE = BuildMode(delay_site="epilogue_store"), BuildMode(delay_site="epilogue_transpose")
_LATE_TILES = (128, 32), (96, 128)
_CUTS: tuple[dict[str, int], ...] = (
    {},
    {"tile_channels": 48},
    {"tile_tokens": 13},
    {"cluster": 2},
    {"cluster": 2, "tile_channels": 16, "tile_tokens": 9},
    {"cluster": 2, "share_weights": 1},
    {"band": 2, "tile_channels": 32},
)
_TOKEN = 0xFFFFFFFF

Library = Callable[..., _C.Library]


@pytest.fixture(scope="module")
def library() -> Library:
    """Give a function of variant and mode that returns the kernel."""
    wanted = [(variant, RELEASE) for variant in _VARIANTS.values()]
    wanted += [(_VARIANTS[tile, "int8"], mode) for tile in _LATE_TILES for mode in _LATE]
    libraries = load(wanted)
    return lambda variant, mode=RELEASE: libraries[variant, mode]


def check(
    kernel: _C.Library, variant: GemmTiled, m: int, n: int, k: int, cut: dict[str, int]
) -> None:
    """See that the best are those of the logits, which are stored where they are sampled from."""
    x, w = random_codes(m, n, k)
    if variant.dtype == "bf16":
        x, w = x.sign().bfloat16(), w.bfloat16()  # their sums are exact in fp32
    w[n // 2 :] = w[: n - n // 2].clone()  # each best comes twice
    x_scale = torch.linspace(0.01, 0.02, m, device="cuda")
    w_scale = torch.full((n,), 0.02, device="cuda")
    scales = (x_scale, w_scale) if variant.dtype == "int8" else (None, None)
    rows = torch.arange(m, device="cuda")
    temperature = torch.where(rows % 7 == 3, 0.5, 0.0) * (rows > 40)
    penalty = torch.where(rows % 11 == 5, 1.2, 1.0)
    parts = variant.argmax_parts(n, cut.get("tile_channels", 0))
    out = torch.full((m + 1, n + 4), 99.0, device="cuda")
    argmax = torch.full((m + 1, parts + 1), 99, device="cuda")
    launch(
        *(kernel, x, ops.pack_weight(w), *scales, out),
        best=argmax.data_ptr(),
        best_stride=argmax.stride(0),
        temperature=temperature.data_ptr(),
        repetition_penalty=penalty.data_ptr(),
        **cut,
    )
    exact = (x.double() @ w.double().t()).float()
    if variant.dtype == "int8":
        exact = x_scale[:, None] * (w_scale * exact)
    read = (temperature > 0) | (penalty != 1)
    assert torch.equal(out[:m, :n][read], exact[read])
    for written in (out[m], out[:, n:], argmax[m], argmax[:, parts:]):
        assert (written == 99).all(), "written outside"
    unsigned = argmax[:m, :parts] ^ (-1 << 63)
    assert torch.equal(unsigned.amin(1) & _TOKEN, exact.argmax(1))


@pytest.mark.parametrize("cut", _CUTS, ids=str)
@pytest.mark.parametrize("variant", _VARIANTS.values(), ids=lambda variant: variant.name)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 200, 256), (70, 1003, 1040), (333, 520, 144)])
def test_every_cut_finds_the_best(
    library: Library, variant: GemmTiled, cut: dict[str, int], m: int, n: int, k: int
) -> None:
    if cut.get("tile_tokens", 0) <= variant.tokens:
        check(library(variant), variant, m, n, k, cut)


@pytest.mark.parametrize("tile", _TILES, ids=str)
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("left", [1, 20])
def test_where_ctas_share_k(
    library: Library, tile: tuple[int, int], rounds: int, left: int
) -> None:
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // 2
    n = 2 * (rounds * clusters + left) * tile[0] - 9
    cut = {"cluster": 2, "split_k": 2}
    variant = _VARIANTS[tile, "int8"]
    check(library(variant), variant, tile[1] - 3, n, 400, cut)


@pytest.mark.parametrize("tile", _LATE_TILES, ids=str)
@pytest.mark.parametrize("mode", _LATE, ids=str)
def test_injected_delays_change_no_token(
    library: Library, mode: BuildMode, tile: tuple[int, int]
) -> None:
    for cut in ({}, {"cluster": 2, "tile_channels": 48}, {"cluster": 2, "share_weights": 1}):
        variant = _VARIANTS[tile, "int8"]
        check(library(variant, mode), variant, 100, 2000, 1504, cut)
