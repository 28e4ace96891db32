"""Linear layers that make their own 8-bit activations, on a GPU: no delay changes a bit."""

from __future__ import annotations

import pytest
import torch

from ostinato import _C, ops
from ostinato.jit.compiler import build, plan
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.jit.variant import Variant
from ostinato.ops.linear.fused_cuda import ActivatedLinear, FusedLinear

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

# An MLP: what its first launch leaves is in memory of the second's.
_GATED = FusedLinear(
    kind="rms_norm", in_dtype="bf16", out_dtype="bf16", max_k=4096, activation="silu_mul"
)
_DOWN = ActivatedLinear(out_dtype="bf16")
_MLP_SITES = {
    _GATED: ("fused_linear_maxima_store", "small_m_partial_store", "small_m_stage_load"),
    _DOWN: (
        *("activated_linear_x_requested", "activated_linear_stage_load"),
        *("activated_linear_stage_release", "activated_linear_partial_store"),
        *("activated_linear_partial_load", "activated_linear_output_store", "small_m_stage_issue"),
    ),
}

Libraries = dict[tuple[Variant, BuildMode], _C.Library]


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    wanted: list[tuple[Variant, BuildMode]] = [(v, RELEASE) for v in (*_VARIANTS, *_MLP_SITES)]
    wanted += [(v, BuildMode(delay_site=site)) for v in _VARIANTS for site in _SITES]
    wanted += [(v, BuildMode(delay_site=site)) for v in _MLP_SITES for site in _MLP_SITES[v]]
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


def _launch_mlp(first: _C.Library, second: _C.Library, k: int, width: int) -> torch.Tensor:
    """Return what both launches leave, each of which may start before its predecessor ends."""
    generator = torch.Generator("cuda").manual_seed(width + k)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def weight(n: int, of: int) -> ops.PackedWeight:
        return ops.pack_weight((randn(n, of) * 20).clamp(-127, 127).to(torch.int8))

    x, norm = randn(k).bfloat16(), randn(k).bfloat16()
    gate_up, down = weight(2 * width, k), weight(k, width)
    scale = torch.full((2 * width + k,), 2.0**-9, device="cuda")
    ctas = min(width // 16, torch.cuda.get_device_properties(0).multi_processor_count)
    made = torch.full((width + ctas,), torch.nan, device="cuda")
    out = torch.full((k,), torch.nan, dtype=torch.bfloat16, device="cuda")
    how = {"w_scale": scale.data_ptr(), "w_scale_stride": 1, "n_maxima": ctas, "pdl": True}
    how["maxima"] = made[width:].data_ptr()
    how["stream"] = torch.cuda.current_stream().cuda_stream
    for _ in range(3):  # the next writes what the one before it has read
        first.launch(
            x=x.data_ptr(),
            norm_weight=norm.data_ptr(),
            eps=1e-5,
            w=gate_up.data.data_ptr(),
            out=made.data_ptr(),
            n=2 * width,
            k=k,
            **how,
        )
        second.launch(
            x=made.data_ptr(), w=down.data.data_ptr(), out=out.data_ptr(), n=k, k=width, **how
        )
    return torch.cat([made, out.float()])


@pytest.mark.parametrize(("k", "width"), [(112, 64), (1040, 2512), (4096, 12288)])
@pytest.mark.parametrize(
    ("variant", "site"),
    [(variant, site) for variant, sites in _MLP_SITES.items() for site in sites],
    ids=lambda value: getattr(value, "family", value),
)
def test_delays_within_an_mlp_change_no_bit(
    libraries: Libraries, variant: Variant, site: str, k: int, width: int
) -> None:
    launches = [libraries[_GATED, RELEASE], libraries[_DOWN, RELEASE]]
    expected = _launch_mlp(*launches, k, width)
    assert expected.isfinite().all()
    launches[variant is _DOWN] = libraries[variant, BuildMode(delay_site=site)]
    for _ in range(2):
        assert torch.equal(_launch_mlp(*launches, k, width), expected)
