"""The GEMM for few tokens on a GPU: exact, whatever is delayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels_gemm import exact, load, multiply, random_codes

from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.linear.gemm_variants import GEMM_SMALL_M, GemmSmallM

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_SITES = (
    *("small_m_x_requested", "small_m_scale_store", "small_m_stage_issue", "small_m_stage_load"),
    *("small_m_stage_release", "small_m_partial_store", "small_m_partial_load"),
    "small_m_output_store",
)
_VARIANTS = tuple(v for v in GEMM_SMALL_M if v.out_dtype == "bf16")
# N and K: less than a tile an SM, ragged, one pass and several of an SM's share, K beyond the ring.
_SIZES = [(90, 100), (2500, 1040), (6144, 2048), (12_000, 640), (4096, 14_336)]

Launch = Callable[[GemmSmallM, BuildMode, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def launch() -> Launch:
    """Give a function of variant, mode and operands that returns out."""
    wanted = [(v, BuildMode(delay_site=site)) for v in _VARIANTS for site in _SITES]
    libraries = load([*((v, RELEASE) for v in _VARIANTS), *wanted])
    return lambda variant, mode, x, w: multiply(libraries[variant, mode], x, w)


def _operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = random_codes(m, n, -(-k // 16) * 16)
    return x[:, :k], w[:, :k].contiguous()


@pytest.mark.parametrize(("n", "k"), _SIZES)
@pytest.mark.parametrize("site", _SITES)
@pytest.mark.parametrize("variant", _VARIANTS, ids=lambda v: v.name)
def test_injected_delays_change_no_bit(
    launch: Launch, variant: GemmSmallM, site: str, n: int, k: int
) -> None:
    x, w = _operands(variant.max_m - 1, n, k)
    expected = exact(x, w)
    for _ in range(3):
        assert torch.equal(launch(variant, BuildMode(delay_site=site), x, w), expected)


@pytest.mark.parametrize(("n", "k"), _SIZES)
@pytest.mark.parametrize(
    ("variant", "m"),
    [(v, m) for v in _VARIANTS for m in (1, 3, 8, 9, 16) if m <= v.max_m],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_share_of_the_weights(
    launch: Launch, variant: GemmSmallM, n: int, k: int, m: int
) -> None:
    x, w = _operands(m, n, k)
    assert torch.equal(launch(variant, RELEASE, x, w), exact(x, w))
