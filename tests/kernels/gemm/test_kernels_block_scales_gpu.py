"""The tiled GEMM with block scales on a GPU: every way of cutting the output, and late threads.

Scales are powers of two and products small integers, so that every sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_gemm import load

from ostinato import _C, ops
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.linear.gemm_variants import GEMM_TILED, GemmTiled

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

E4M3 = torch.float8_e4m3fn
VARIANTS = {
    (variant.channels, variant.tokens, variant.scale_channels): variant
    for variant in GEMM_TILED
    if variant.block_scales and variant.out_dtype == "bf16"
}
_SITES = (
    *("tokens", "weights", "consumer", "release", "cluster_reduce"),
    *("epilogue_transpose", "epilogue_store"),
)
# As the launch chooses, tiles that are not whole, clusters, bands.
_CUTS: tuple[dict[str, int], ...] = (
    {},
    {"tile_channels": 48},
    {"tile_tokens": 7},
    {"cluster": 2},
    {"cluster": 2, "tile_channels": 16, "tile_tokens": 5},
    {"cluster": 2, "band": 3},
    {"cluster": 2, "share_weights": 1},
    {"cluster": 2, "share_weights": 1, "tile_channels": 48, "tile_tokens": 7},
    {"band": 2, "tile_channels": 32},
)
# One tile for few tokens, one that turns results, two with tokens as rows, and one whose pieces are
# multiplied one at a time.
_LATE = ((64, 16, 8), (128, 32, 8), (128, 64, 128), (128, 128, 8), (256, 128, 128))

Launch = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def libraries() -> dict[tuple[GemmTiled, BuildMode], _C.Library]:
    return load([(variant, RELEASE) for variant in VARIANTS.values()])


@pytest.fixture(scope="module")
def late_libraries() -> dict[tuple[GemmTiled, BuildMode], _C.Library]:
    return load([(VARIANTS[tile], BuildMode(delay_site=site)) for tile in _LATE for site in _SITES])


class Product:
    """Operands on a GPU, whose results are exact: what is not theirs in memory is NaN."""

    def __init__(self, m: int, n: int, k: int, shared: int) -> None:
        groups, shares = -(-k // 128), -(-n // shared)
        wide = torch.full((m, -(-k // 16) * 16 + 16), torch.nan, device="cuda").to(E4M3)
        x, w = (torch.randint(-1, 2, (rows, k), device="cuda").float() for rows in (m, n))
        wide[:, :k] = x.to(E4M3)
        self.x, self.w = wide[:, :k], ops.pack_weight(w.to(E4M3))
        self.x_scale, self.w_scale = _scales(groups, m), _scales(groups, shares)
        self.bias = torch.randint(-8, 9, (n,), device="cuda").bfloat16()
        of_k = torch.arange(k, device="cuda") // 128
        of_x = x.double() * self.x_scale[of_k].t()
        of_w = w.double() * self.w_scale[of_k].t().repeat_interleave(shared, 0)[:n]
        self.exact = (of_x @ of_w.t() + self.bias.double()).float().bfloat16()

    def run(self, library: _C.Library, **cut: Any) -> torch.Tensor:
        """Launch, check that nothing around the output is written, and return it."""
        m, n = self.exact.shape
        guarded = torch.full((m + 2, n + 16), 99.0, dtype=torch.bfloat16, device="cuda")
        out = guarded[1 : m + 1, 8 : n + 8].fill_(torch.nan)
        library.launch(
            x=self.x.data_ptr(),
            x_stride=self.x.stride(0),
            w=self.w.data.data_ptr(),
            w_stride=0,
            x_scale=self.x_scale.data_ptr(),
            x_scale_stride=self.x_scale.stride(0),
            w_scale=self.w_scale.data_ptr(),
            w_scale_stride=self.w_scale.stride(0),
            bias=self.bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            m=m,
            n=n,
            k=self.x.size(1),
            stream=torch.cuda.current_stream().cuda_stream,
            pdl=True,
            **cut,
        )
        whole = guarded.clone()
        whole[1 : m + 1, 8 : n + 8] = 99.0
        assert (whole == 99.0).all(), "written outside out"
        return out


def _scales(groups: int, columns: int) -> torch.Tensor:
    """Return powers of two amid NaN."""
    stride = -(-columns // 4) * 4 + 4
    storage = torch.full((groups + 1, stride), torch.nan, device="cuda")
    scales = storage[:groups, :columns]
    scales.copy_(2.0 ** torch.randint(-3, 4, (groups, columns), device="cuda").float())
    return scales


@pytest.mark.parametrize("tile", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 200, 256), (7, 1003, 1040), (70, 328, 2000), (333, 520, 144)]
)
def test_every_cut_gives_the_same_sums(
    libraries: dict[Any, _C.Library], tile: tuple[int, int, int], m: int, n: int, k: int
) -> None:
    product = Product(m, n, k, tile[2])
    for cut in _CUTS:
        got = product.run(libraries[VARIANTS[tile], RELEASE], **cut)
        assert torch.equal(got, product.exact), cut


@pytest.mark.parametrize("tile", [tile for tile in VARIANTS if tile[1] > 16], ids=str)
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("left", [1, 20])
def test_ctas_share_k_in_the_last_round(
    libraries: dict[Any, _C.Library], tile: tuple[int, int, int], rounds: int, left: int
) -> None:
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // 2
    groups = rounds * clusters + left
    product = Product(tile[1] - 3, 2 * groups * tile[0] - 9, 1300, tile[2])
    got = product.run(libraries[VARIANTS[tile], RELEASE], cluster=2, split_k=2)
    assert torch.equal(got, product.exact)


@pytest.mark.parametrize("tile", _LATE, ids=str)
@pytest.mark.parametrize("site", _SITES)
def test_injected_delays_change_no_bit(
    late_libraries: dict[Any, _C.Library], site: str, tile: tuple[int, int, int]
) -> None:
    product = Product({16: 13, 32: 30}.get(tile[1], 150), 2000, 1500, tile[2])
    cuts: list[dict[str, int]] = [{"cluster": 2, "tile_channels": 48}]
    if tile[1] > 16:
        cuts += [{"cluster": 2, "split_k": 2}, {"cluster": 2, "share_weights": 1}]
    for cut in cuts:
        for _ in range(3):
            got = product.run(late_libraries[VARIANTS[tile], BuildMode(delay_site=site)], **cut)
            assert torch.equal(got, product.exact)


def test_all_tiles_round_alike_every_time(libraries: dict[Any, _C.Library]) -> None:
    """Scales and products of any size: the same bits whoever multiplies, a thousand times."""
    product, of_blocks = Product(150, 1000, 3000, 8), _scales(24, 8)
    product.x.copy_(torch.randn(150, 3000, device="cuda").to(E4M3))
    product.w.data.copy_(torch.randn(product.w.data.shape, device="cuda").to(E4M3))
    product.x_scale.uniform_(0.01, 1)
    of_blocks.uniform_(0.01, 1)
    of_channels = product.w_scale.copy_(of_blocks.repeat_interleave(16, 1)[:, :125])
    expected = product.run(libraries[VARIANTS[128, 128, 8], RELEASE])
    cuts = ({"cluster": 1}, {"cluster": 2}, {"cluster": 2, "share_weights": 1})
    for variant in VARIANTS.values():
        product.w_scale = of_channels if variant.scale_channels == 8 else of_blocks
        for cut in (*cuts * 23, {"tile_channels": 48, "tile_tokens": 7}):
            assert torch.equal(product.run(libraries[variant, RELEASE], **cut), expected), cut


@pytest.mark.parametrize("name", ["x_scale", "w_scale"])
def test_scales_that_tma_cannot_read_are_refused(
    libraries: dict[Any, _C.Library], name: str
) -> None:
    for view in (
        lambda scale: scale[:, 1:],
        lambda scale: torch.empty(scale.size(0), 13, device="cuda"),
    ):
        product = Product(5, 40, 300, 8)
        setattr(product, name, view(getattr(product, name)))
        with pytest.raises(RuntimeError, match="invalid argument"):
            product.run(libraries[VARIANTS[64, 8, 8], RELEASE])
