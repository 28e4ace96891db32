"""The tiled GEMM on a GPU: every way of cutting the output, and bits that no delay changes.

What the ops choose of it is tested where they are (tests/ops).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_gemm import exact, load, multiply, random_codes

from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.linear.gemm_variants import GEMM_TILED, GemmTiled

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_SITES = (
    *("tokens", "weights", "consumer", "release", "cluster_reduce"),
    *("epilogue_transpose", "epilogue_store"),
)
_LATE = GemmTiled(dtype="int8", out_dtype="bf16", channels=128, tokens=128)
_PINGPONG = (128, 128, True)
_TILES = (
    *((64, 8, False), (64, 16, False), (128, 16, False), (64, 32, False), (128, 32, False)),
    *((64, 64, False), (160, 64, False)),
    *((96, 128, False), (128, 128, False), (256, 128, False), (128, 256, False), _PINGPONG),
)
_INT8 = {
    (channels, tokens, pingpong): GemmTiled(
        dtype="int8", out_dtype="bf16", channels=channels, tokens=tokens, pingpong=pingpong
    )
    for channels, tokens, pingpong in _TILES
}
_LATE_PINGPONG = _INT8[_PINGPONG]
_LATE_TURNED = _INT8[128, 32, False]
_FEW = _INT8[128, 16, False]
_WIDE = _INT8[128, 256, False]  # stored while the next tile is summed
# By the kind of sums: they add along K in one order.
_FP8 = {
    fast_accum: tuple(
        variant
        for variant in GEMM_TILED
        if variant.dtype == "e4m3"
        and variant.out_dtype == "bf16"
        and variant.fast_accum == fast_accum
        and not variant.block_scales
    )
    for fast_accum in (False, True)
}
# As the launch chooses, tiles that are not whole, clusters, bands.
_CUTS: tuple[dict[str, int], ...] = (
    {},
    {"tile_channels": 48},
    {"tile_tokens": 13},
    {"cluster": 2},
    {"cluster": 2, "tile_channels": 16, "tile_tokens": 9},
    {"cluster": 2, "band": 3},
    {"cluster": 2, "share_weights": 1},
    {"cluster": 2, "share_weights": 1, "tile_channels": 48, "tile_tokens": 11},
    {"band": 2, "tile_channels": 32},
)

Launch = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def launch() -> Launch:
    """Give a function of variant, mode, operands and cut that returns out."""
    wanted: list[tuple[GemmTiled, BuildMode]] = [
        (v, RELEASE) for v in (*_INT8.values(), *_FP8[False], *_FP8[True])
    ]
    wanted += [
        (v, BuildMode(delay_site=site))
        for v in (_LATE, _LATE_PINGPONG, _LATE_TURNED, _FEW, _WIDE)
        for site in _SITES
    ]
    libraries = load(wanted)

    def run(
        variant: GemmTiled, mode: BuildMode, x: torch.Tensor, w: torch.Tensor, **cut: Any
    ) -> torch.Tensor:
        return multiply(libraries[variant, mode], x, w, **cut)

    return run


@pytest.mark.parametrize(
    ("tile", "cut"),
    [(tile, cut) for tile in _TILES for cut in _CUTS if cut.get("tile_tokens", 0) <= tile[1]],
    ids=str,
)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 200, 256), (70, 1003, 1040), (333, 520, 144)])
def test_every_cut_gives_the_same_sums(
    launch: Launch, tile: tuple[int, int, bool], cut: dict[str, int], m: int, n: int, k: int
) -> None:
    x, w = random_codes(m, n, k)
    assert torch.equal(launch(_INT8[tile], RELEASE, x, w, **cut), exact(x, w))


@pytest.mark.parametrize(
    "tile",
    [(128, 16, False), (128, 32, False), (256, 128, False), (128, 256, False), _PINGPONG],
    ids=str,
)
@pytest.mark.parametrize("channels", [16, 64, 80, 112, 128])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("m", [5, 49, 64, 80, 96, 333])
def test_tiles_that_end_within_the_compiled_one(
    launch: Launch, tile: tuple[int, int, bool], channels: int, cluster: int, m: int
) -> None:
    x, w = random_codes(m, 1600, 272)
    cut = {"tile_channels": channels, "cluster": cluster}
    for _ in range(3):
        assert torch.equal(launch(_INT8[tile], RELEASE, x, w, **cut), exact(x, w))


# Of K fewer steps, as many, and more than a tile has chunks to store.
@pytest.mark.parametrize("k", [112, 256, 896, 1024, 1408])
@pytest.mark.parametrize(
    "cut",
    [
        {"tile_channels": 64, "tile_tokens": 96},
        {"tile_channels": 64, "tile_tokens": 96, "cluster": 2},
        {"tile_channels": 128, "tile_tokens": 160, "cluster": 2, "share_weights": 1},
        # Only the last tokens' tiles can wait to be stored, then none.
        {"tile_channels": 64, "tile_tokens": 90, "cluster": 2},
        {"tile_channels": 80, "tile_tokens": 96},
    ],
    ids=str,
)
def test_tiles_stored_while_the_next_is_summed(launch: Launch, cut: dict[str, int], k: int) -> None:
    x, w = random_codes(1500, 6400, k)
    for _ in range(3):
        assert torch.equal(launch(_WIDE, RELEASE, x, w, **cut), exact(x, w))


@pytest.mark.parametrize("tile", [tile for tile in _TILES if tile[1] > 16 and not tile[2]], ids=str)
@pytest.mark.parametrize("rounds", [0, 1, 2])
@pytest.mark.parametrize("left", [1, 20])
def test_ctas_share_k_in_the_last_round(
    launch: Launch, tile: tuple[int, int, bool], rounds: int, left: int
) -> None:
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // 2
    groups = rounds * clusters + left
    x, w = random_codes(tile[1] - 3, 2 * groups * tile[0] - 9, 400)
    got = launch(_INT8[tile], RELEASE, x, w, cluster=2, split_k=2)
    assert torch.equal(got, exact(x, w))


@pytest.mark.parametrize(
    "cut",
    [
        *({"cluster": 3}, {"tile_channels": 40}, {"tile_tokens": 300}, {"split_k": 2}),
        *({"share_weights": 1}, {"cluster": 2, "share_weights": 1, "split_k": 2}),
    ],
    ids=str,
)
def test_impossible_cuts_are_refused(launch: Launch, cut: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match="invalid argument"):
        launch(_LATE, RELEASE, *random_codes(64, 256, 128), **cut)


@pytest.mark.parametrize(
    ("variant", "cut"),
    [
        *((_LATE, {"cluster": 2, "split_k": 2}), (_LATE, {"cluster": 2, "share_weights": 1})),
        (_LATE_PINGPONG, {"cluster": 2, "share_weights": 1, "tile_channels": 32}),
        *((_LATE_TURNED, {"cluster": 2}), (_LATE_TURNED, {"cluster": 2, "split_k": 2})),
        (_LATE_TURNED, {"cluster": 2, "share_weights": 1, "tile_tokens": 16}),
        (_WIDE, {"cluster": 2, "tile_channels": 64, "tile_tokens": 32}),
        *((_FEW, {"tile_channels": 112}), (_FEW, {"cluster": 2, "tile_channels": 48})),
    ],
    ids=str,
)
@pytest.mark.parametrize("site", _SITES)
def test_injected_delays_change_no_bit(
    launch: Launch, site: str, variant: GemmTiled, cut: dict[str, int]
) -> None:
    # More tiles of 32 channels than twice the SMs: both warpgroups get several.
    x, w = random_codes({16: 13, 32: 30}.get(variant.tokens, 300), 2000, 1500)
    x = torch.nn.functional.pad(x, (0, 4))[:, :1500]
    expected = exact(x, w)
    for _ in range(3):
        got = launch(variant, BuildMode(delay_site=site), x, w, **cut)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("fast_accum", [False, True])
def test_fp8_gives_the_same_bits_in_every_tile_every_time(launch: Launch, fast_accum: bool) -> None:
    x, w = (torch.randn(rows, 4096, device="cuda").to(torch.float8_e4m3fn) for rows in (513, 4000))
    expected = launch(_FP8[fast_accum][0], RELEASE, x, w)
    cuts = ({"cluster": 1}, {"cluster": 2}, {"cluster": 2, "share_weights": 1})
    for variant in _FP8[fast_accum]:
        for cut in (*cuts * 15, {"tile_channels": 48, "tile_tokens": min(37, variant.tokens)}):
            assert torch.equal(launch(variant, RELEASE, x, w, **cut), expected), (variant, cut)
