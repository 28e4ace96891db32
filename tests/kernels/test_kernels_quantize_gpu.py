"""The quantisation kernels on a GPU: a row's bits, whoever shares it and whoever is late.

That they are the right bits is tested where the ops are (tests/ops).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ostinato import _C
from ostinato.kernels.compiler import build, plan
from ostinato.kernels.mode import RELEASE, BuildMode
from ostinato.kernels.variants import QUANTIZE_KINDS, Quantize

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_MAXIMUM = ("quantize_maximum_store", "quantize_maximum_load")
_SITES = {
    "per_token": _MAXIMUM,
    "rms_norm": (*_MAXIMUM, "quantize_sum_store", "quantize_sum_load"),
    "silu_mul": (*_MAXIMUM, "quantize_cluster_store", "quantize_cluster_load"),
}
# (m, k): one for every way in which rows are shared among warps and CTAs.
_SHAPES = {
    "per_token": [(3, 4096), (1030, 4096), (140, 14336)],
    "rms_norm": [(3, 4096), (400, 4096), (1030, 4096), (270, 8192), (2, 20000), (2, 40000)],
    "silu_mul": [(2, 14336), (20, 14336), (60, 14336), (140, 14336)],
}

Outputs = list[torch.Tensor]
Run = Callable[..., Outputs]


@pytest.fixture(scope="module")
def run() -> Run:
    """Give a function of kind, mode, inputs and n_active: codes, scales and, if any, sums."""
    wanted = [(kind, RELEASE) for kind in QUANTIZE_KINDS]
    wanted += [(kind, BuildMode(delay_site=site)) for kind in _SITES for site in _SITES[kind]]
    plans = [plan(Quantize(kind=k, in_dtype="bf16", out_dtype="int8"), mode) for k, mode in wanted]
    entries = build(plans)
    libraries = {key: _C.Quantize(str(e.library)) for key, e in zip(wanted, entries, strict=True)}
    for library in libraries.values():
        library.prepare()

    def launch(
        kind: str, mode: BuildMode, inputs: Outputs, n_active: torch.Tensor | None = None
    ) -> Outputs:
        x = inputs[0]
        m, k = x.size(0), x.size(1) // (2 if kind == "silu_mul" else 1)
        out = torch.full((m, k), 99, dtype=torch.int8, device="cuda")
        scale = torch.full((m,), -1.0, device="cuda")
        outputs, norm = [out, scale], {}
        if kind == "rms_norm":
            weight, residual = inputs[1:]
            outputs.append(torch.zeros_like(residual))
            norm = {
                "norm_weight": weight.data_ptr(),
                "residual": residual.data_ptr(),
                "residual_stride": residual.stride(0),
                "residual_out": outputs[-1].data_ptr(),
                "residual_out_stride": k,
                "eps": 1e-6,
            }
        libraries[kind, mode].launch(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=out.data_ptr(),
            out_stride=k,
            scale_out=scale.data_ptr(),
            m=m,
            k=k,
            stream=torch.cuda.current_stream().cuda_stream,
            pdl=True,
            n_active=0 if n_active is None else n_active.data_ptr(),
            **norm,
        )
        return outputs

    return launch


def _inputs(kind: str, m: int, k: int) -> Outputs:
    x = torch.randn(m, 2 * k if kind == "silu_mul" else k, device="cuda").bfloat16()
    if kind != "rms_norm":
        return [x]
    return [x, torch.randn(k, device="cuda").bfloat16(), torch.randn_like(x)]


_CASES = [(kind, *shape) for kind in QUANTIZE_KINDS for shape in _SHAPES[kind]]


@pytest.mark.parametrize(
    ("kind", "site", "m", "k"),
    [(kind, site, m, k) for kind, m, k in _CASES for site in _SITES[kind]],
)
def test_injected_delays_change_no_bit(run: Run, kind: str, site: str, m: int, k: int) -> None:
    inputs = _inputs(kind, m, k)
    expected = run(kind, RELEASE, inputs)
    for _ in range(3):
        late = run(kind, BuildMode(delay_site=site), inputs)
        assert all(map(torch.equal, late, expected))


@pytest.mark.parametrize("kind", QUANTIZE_KINDS)
@pytest.mark.parametrize("k", [7, 200, 1000, 4096, 8192, 14336, 20000])
def test_a_row_does_not_depend_on_the_rows_around_it(run: Run, kind: str, k: int) -> None:
    x, *others = _inputs(kind, 1100, k)
    weights, residuals = others[:1], others[1:]
    expected = run(kind, RELEASE, [x, *others])
    for first, end in [(0, 1), (3, 11), (5, 71), (40, 180), (7, 300), (1, 1090)]:
        rows = [x[first:end], *weights, *(tensor[first:end] for tensor in residuals)]
        got = run(kind, RELEASE, rows)
        assert all(torch.equal(a, b[first:end]) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "m", "k"), [*_CASES, *((kind, 70, 200) for kind in QUANTIZE_KINDS)]
)
def test_padding_is_left_out_and_changes_no_real_row(run: Run, kind: str, m: int, k: int) -> None:
    x, *others = _inputs(kind, m, k)
    weights, residuals = others[:1], others[1:]
    expected = run(kind, RELEASE, [x, *others])
    for real in sorted({0, 1, m // 2, m - 1, m, m + 5}, reverse=True):
        n_active = torch.tensor([real], dtype=torch.int32, device="cuda")
        for tensor in (x, *residuals):
            tensor[real:] = torch.nan
        codes, scales, *sums = run(kind, RELEASE, [x, *weights, *residuals], n_active)
        for got, want in zip((codes, scales, *sums), expected, strict=True):
            assert torch.equal(got[:real], want[:real])
        assert (codes[real:] == 99).all()
        assert (scales[real:] == -1).all()
        assert not any(total[real:].any() for total in sums)


@pytest.mark.parametrize("kind", QUANTIZE_KINDS)
@pytest.mark.parametrize(
    ("m", "k"), [(3, 1024), (300, 4096), (1030, 4096), (270, 8192), (3, 20000), (2, 40000)]
)
def test_alignment_changes_no_bit(run: Run, kind: str, m: int, k: int) -> None:
    x, *others = _inputs(kind, m, k)
    shifted = torch.empty(m, x.size(1) + 1, dtype=x.dtype, device="cuda")[:, 1:]
    shifted.copy_(x)
    expected = run(kind, RELEASE, [x, *others])
    assert all(map(torch.equal, run(kind, RELEASE, [shifted, *others]), expected))
