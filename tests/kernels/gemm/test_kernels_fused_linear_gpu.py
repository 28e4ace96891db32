"""The linear layer that makes its own 8-bit activations, on a GPU: no delay changes a bit."""

from __future__ import annotations

import pytest
import torch

from ostinato import _C, ops
from ostinato.jit.compiler import build, plan
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.linear.fused_cuda import FusedLinear

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_SITES = (
    *("fused_linear_sum_store", "fused_linear_sum_load", "fused_linear_maximum_store"),
    *("fused_linear_maximum_load", "fused_linear_codes_store"),
    *("small_m_x_requested", "small_m_scale_store", "small_m_stage_issue", "small_m_stage_load"),
    *("small_m_stage_release", "small_m_partial_store", "small_m_partial_load"),
)
_VARIANTS = tuple(
    FusedLinear(kind=kind, in_dtype="bf16", out_dtype="bf16", max_k=4096, weight_dtype=weight)
    for kind, weight in (("rms_norm", "bf16"), ("rms_norm", "fp32"), ("per_token", "bf16"))
)

Libraries = dict[tuple[FusedLinear, BuildMode], _C.Library]


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    wanted = [(v, RELEASE) for v in _VARIANTS]
    wanted += [(v, BuildMode(delay_site=site)) for v in _VARIANTS for site in _SITES]
    entries = build([plan(*item) for item in wanted])
    loaded = {}
    for item, entry in zip(wanted, entries, strict=True):
        loaded[item] = _C.Library(str(entry.library))
        loaded[item].prepare()
    return loaded


def _launch(library: _C.Library, variant: FusedLinear, n: int, k: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(n + k)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x, residual, norm, w = randn(k), randn(k), randn(k), randn(n, k)
    if variant.weight_dtype == "fp32":
        norm = norm.float()
    packed = ops.pack_weight((w * 20).clamp(-127, 127).to(torch.int8))
    scale = torch.full((n,), 2.0**-9, device="cuda")
    out = torch.full((n + k,), torch.nan, dtype=torch.bfloat16, device="cuda")
    rows = {}
    if variant.kind == "rms_norm":
        rows = {
            "residual": residual.data_ptr(),
            "residual_out": out[n:].data_ptr(),
            "norm_weight": norm.data_ptr(),
            "eps": 1e-5,
        }
    library.launch(
        x=x.data_ptr(),
        w=packed.data.data_ptr(),
        w_scale=scale.data_ptr(),
        w_scale_stride=1,
        out=out.data_ptr(),
        n=n,
        k=k,
        stream=torch.cuda.current_stream().cuda_stream,
        **rows,
    )
    return out if rows else out[:n]


@pytest.mark.parametrize(("n", "k"), [(96, 112), (2504, 1040), (6144, 4096)])
@pytest.mark.parametrize("site", _SITES)
@pytest.mark.parametrize("variant", _VARIANTS, ids=lambda v: v.name)
def test_injected_delays_change_no_bit(
    libraries: Libraries, variant: FusedLinear, site: str, n: int, k: int
) -> None:
    expected = _launch(libraries[variant, RELEASE], variant, n, k)
    assert expected.isfinite().all()
    delayed = libraries[variant, BuildMode(delay_site=site)]
    for _ in range(2):
        assert torch.equal(_launch(delayed, variant, n, k), expected)
