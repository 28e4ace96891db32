"""The kernels of norms, activations and quantisation on a GPU: a row's bits, whoever is late.

That they are the right bits is tested where the ops are (tests/ops).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ostinato import _C, ops
from ostinato.jit.compiler import build, plan
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.linear.quantize_cuda import GATED, NORMS, Quantize

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_MAXIMUM = ("quantize_maximum_store", "quantize_maximum_load")
_SUM = ("quantize_sum_store", "quantize_sum_load")
_CLUSTER = ("quantize_cluster_store", "quantize_cluster_load")
# By kind and dtype of the results. Those that are not quantised need no maximum.
_SITES = {
    ("per_token", "int8"): _MAXIMUM,
    ("rms_norm", "int8"): (*_MAXIMUM, *_SUM),
    ("layer_norm", "int8"): (*_MAXIMUM, *_SUM),
    ("silu_mul", "int8"): (*_MAXIMUM, *_CLUSTER),
    ("gelu_tanh_mul", "int8"): (*_MAXIMUM, *_CLUSTER),
    ("gelu", "int8"): (*_MAXIMUM, *_CLUSTER),
    ("relu2", "int8"): _MAXIMUM,
    ("rms_norm", "bf16"): _SUM,
    ("layer_norm", "bf16"): _SUM,
    ("silu_mul", "bf16"): (),
    ("gelu_tanh_mul", "bf16"): (),
    ("relu2", "bf16"): (),
}
# Where a NaN replaces a static scale that another thread stores.
_SCALE = BuildMode(delay_site="quantize_scale_store")
_STATIC = ("per_token", *NORMS, "silu_mul", "gelu", "relu2")
_DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16}
# (m, k): one for every way in which rows are shared among warps and CTAs.
_OF_ROWS = [(3, 4096), (1030, 4096), (140, 14336)]
_OF_NORMS = [(3, 4096), (400, 4096), (1030, 4096), (270, 8192), (2, 20000), (2, 40000)]
_OF_SHARED_ROWS = [(2, 14336), (20, 14336), (60, 14336), (140, 14336)]
_SHAPES = {
    "per_token": _OF_ROWS,
    "rms_norm": _OF_NORMS,
    "layer_norm": [*_OF_NORMS, (1030, 14000), (400, 16384)],
    "silu_mul": _OF_SHARED_ROWS,
    "gelu_tanh_mul": _OF_SHARED_ROWS,
    "gelu": [*_OF_SHARED_ROWS, (1030, 4096), (2, 40000)],
    "relu2": [*_OF_ROWS, (2, 20000)],
}

Outputs = list[torch.Tensor]
Run = Callable[..., Outputs]


@pytest.fixture(scope="module")
def run() -> Run:
    """Give a function of kind, dtype, mode, inputs and options: results, scales, sums, if any."""
    wanted = [(*how, RELEASE) for how in _SITES]
    wanted += [(*how, BuildMode(delay_site=site)) for how in _SITES for site in _SITES[how]]
    wanted += [(kind, "int8", _SCALE) for kind in _STATIC]
    plans = [
        plan(Quantize(kind=kind, in_dtype="bf16", out_dtype=dtype), mode)
        for kind, dtype, mode in wanted
    ]
    entries = build(plans)
    libraries = {key: _C.Library(str(e.library)) for key, e in zip(wanted, entries, strict=True)}
    for library in libraries.values():
        library.prepare()

    def launch(
        kind: str,
        dtype: str,
        mode: BuildMode,
        inputs: Outputs,
        n_active: torch.Tensor | None = None,
        static_scale: torch.Tensor | None = None,
    ) -> Outputs:
        x = inputs[0]
        m, k = x.size(0), x.size(1) // (2 if kind in GATED else 1)
        out = torch.full((m, k), 99, dtype=_DTYPES[dtype], device="cuda")
        scale = torch.full((m if dtype == "int8" else 0,), 99.0, device="cuda")
        outputs, norm = [out, scale], {}
        if kind in NORMS:
            weight, residual, *bias = inputs[1:]
            outputs.append(torch.full_like(residual, 99.0))
            norm = {
                "norm_weight": weight.data_ptr(),
                "residual": residual.data_ptr(),
                "residual_stride": residual.stride(0),
                "residual_out": outputs[-1].data_ptr(),
                "residual_out_stride": k,
                "eps": 1e-6,
                "norm_bias": bias[0].data_ptr() if bias else 0,
            }
        libraries[kind, dtype, mode].launch(
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
            static_scale=0 if static_scale is None else static_scale.data_ptr(),
            **norm,
        )
        return outputs

    return launch


def _inputs(kind: str, m: int, k: int) -> Outputs:
    """Return x, and for a norm weight, residual, and the bias of a layer norm."""
    x = torch.randn(m, 2 * k if kind in GATED else k, device="cuda").bfloat16()
    if kind not in NORMS:
        return [x]
    weight, bias = torch.randn(2, k, device="cuda").bfloat16()
    return [x, weight, torch.randn_like(x), *([bias] if kind == "layer_norm" else [])]


_CASES = [(*how, *shape) for how in _SITES for shape in _SHAPES[how[0]]]


@pytest.mark.parametrize(
    ("kind", "dtype", "site", "m", "k"),
    [(kind, dtype, site, m, k) for kind, dtype, m, k in _CASES for site in _SITES[kind, dtype]],
)
def test_injected_delays_change_no_bit(
    run: Run, kind: str, dtype: str, site: str, m: int, k: int
) -> None:
    inputs = _inputs(kind, m, k)
    expected = run(kind, dtype, RELEASE, inputs)
    for _ in range(3):
        late = run(kind, dtype, BuildMode(delay_site=site), inputs)
        assert all(map(torch.equal, late, expected))


_STATIC_CASES = [
    (kind, *shape) for kind in _STATIC for shape in [*_SHAPES[kind], (5, 200), (300, 1000)]
]


@pytest.mark.parametrize("mode", [RELEASE, _SCALE], ids=["release", "late"])
@pytest.mark.parametrize(("kind", "m", "k"), [*_STATIC_CASES, ("per_token", 3, 40000)])
def test_a_nan_replaces_the_static_scale_of_its_row(
    run: Run, kind: str, m: int, k: int, mode: BuildMode
) -> None:
    x, *others = _inputs(kind, m, k)
    scale = torch.tensor([0.02], device="cuda")
    expected = run(kind, "int8", RELEASE, [x, *others], static_scale=scale)
    assert (expected[1] == scale).all()
    whole = torch.ones(m, dtype=torch.bool, device="cuda")
    # The last thread that has a part of a row, the first one's neighbour, and the middle.
    for row, column in zip((0, m // 2, m - 1), (-1, min(40, k - 1), k // 2), strict=True):
        x[row, column] = torch.nan
        whole[row] = False
    for _ in range(3):
        found = run(kind, "int8", mode, [x, *others], static_scale=scale)
        assert found[1][~whole].isnan().all()
        assert all(torch.equal(a[whole], b[whole]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("kind", "m", "k"), _STATIC_CASES)
def test_padding_is_left_out_with_static_scales(run: Run, kind: str, m: int, k: int) -> None:
    x, *others = _inputs(kind, m, k)
    scale = torch.tensor([0.02], device="cuda")
    n_active = torch.tensor([m // 2], dtype=torch.int32, device="cuda")
    x[m // 2 :] = torch.nan
    codes, scales, *_ = run(kind, "int8", RELEASE, [x, *others], n_active, scale)
    assert (scales[: m // 2] == scale).all()
    assert (scales[m // 2 :] == 99).all()
    assert (codes[m // 2 :] == 99).all()


@pytest.mark.parametrize(("kind", "dtype"), _SITES)
@pytest.mark.parametrize("k", [7, 200, 1000, 4096, 8192, 14336, 20000])
def test_a_row_does_not_depend_on_the_rows_around_it(
    run: Run, kind: str, dtype: str, k: int
) -> None:
    x, *others = _inputs(kind, 1100, k)
    weights, residuals, biases = others[:1], others[1:2], others[2:]
    expected = run(kind, dtype, RELEASE, [x, *others])
    for first, end in [(0, 1), (3, 11), (5, 71), (40, 180), (7, 300), (1, 1090)]:
        rows = [x[first:end], *weights, *(tensor[first:end] for tensor in residuals), *biases]
        got = run(kind, dtype, RELEASE, rows)
        assert all(torch.equal(a, b[first:end]) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype", "m", "k"), [*_CASES, *((*how, 70, 200) for how in _SITES)]
)
def test_padding_is_left_out_and_changes_no_real_row(
    run: Run, kind: str, dtype: str, m: int, k: int
) -> None:
    x, *others = _inputs(kind, m, k)
    weights, residuals, biases = others[:1], others[1:2], others[2:]
    expected = run(kind, dtype, RELEASE, [x, *others])
    for real in sorted({0, 1, m // 2, m - 1, m, m + 5}, reverse=True):
        n_active = torch.tensor([real], dtype=torch.int32, device="cuda")
        for tensor in (x, *residuals):
            tensor[real:] = torch.nan
        results = run(kind, dtype, RELEASE, [x, *weights, *residuals, *biases], n_active)
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got[:real], want[:real])
            assert (got[real:] == 99).all()


@pytest.mark.parametrize(("kind", "dtype"), _SITES)
@pytest.mark.parametrize(
    ("m", "k"), [(3, 1024), (300, 4096), (1030, 4096), (270, 8192), (3, 20000), (2, 40000)]
)
def test_alignment_changes_no_bit(run: Run, kind: str, dtype: str, m: int, k: int) -> None:
    x, *others = _inputs(kind, m, k)
    shifted = torch.empty(m, x.size(1) + 1, dtype=x.dtype, device="cuda")[:, 1:]
    shifted.copy_(x)
    expected = run(kind, dtype, RELEASE, [x, *others])
    assert all(map(torch.equal, run(kind, dtype, RELEASE, [shifted, *others]), expected))


@pytest.mark.parametrize("k", [61, 1024, 4096, 8192, 14336, 40000])
@pytest.mark.parametrize("m", [1, 32])
def test_what_is_not_quantised_may_come_late(
    m: int, k: int, write_late: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Weights as well as rows, all written by the kernel in front, which lets this one start."""
    right = torch.randn(2 * m + 2, k, device="cuda").bfloat16()
    late = torch.empty_like(right)

    def norm(rows: torch.Tensor) -> Outputs:
        return [ops.rms_norm(rows[:m], rows[-1], 1e-6)]

    def norm_of_sum(rows: torch.Tensor) -> Outputs:
        return list(ops.rms_norm(rows[:m], rows[-1], 1e-6, residual=rows[m : 2 * m]))

    def layer_norm(rows: torch.Tensor) -> Outputs:
        bias, residual = rows[-2], rows[m : 2 * m]
        return list(ops.layer_norm(rows[:m], rows[-1], 1e-6, bias=bias, residual=residual))

    def layer_norm_of_heads(rows: torch.Tensor) -> Outputs:
        x = rows[:m].unsqueeze(1)
        return [ops.layer_norm(x, rows[-1:], 1e-6, bias=rows[-2:-1])]

    def gate(rows: torch.Tensor) -> Outputs:
        return [ops.silu_mul(rows.view(-1, 2 * k))]

    def activation(rows: torch.Tensor) -> Outputs:
        return [ops.activation(rows, "gelu_tanh"), ops.activation(rows, "relu2")]

    for run in (norm, norm_of_sum, layer_norm, layer_norm_of_heads, gate, activation):
        want = run(right)
        late.fill_(torch.nan)
        torch.cuda.synchronize()  # or the predecessor's own start would wait for this
        write_late(late.view(-1).view(torch.int32), right.view(-1).view(torch.int32))
        assert all(map(torch.equal, run(late), want))


def test_a_launch_says_when_scales_do_not_go_with_its_results() -> None:
    x = torch.zeros(2, 16, dtype=torch.bfloat16, device="cuda")
    for dtype, scale, static in (("bf16", 1, 0), ("bf16", 0, 1), ("int8", 0, 0), ("int8", 0, 1)):
        variant = Quantize(kind="silu_mul", in_dtype="bf16", out_dtype=dtype)
        (entry,) = build([plan(variant)])
        library = _C.Library(str(entry.library))
        with pytest.raises(RuntimeError, match="invalid argument"):
            library.launch(
                x=x.data_ptr(),
                x_stride=16,
                out=x.data_ptr(),
                out_stride=16,
                scale_out=scale * x.data_ptr(),
                static_scale=static * x.data_ptr(),
                m=2,
                k=8,
                stream=torch.cuda.current_stream().cuda_stream,
            )


def test_a_launch_of_heads_takes_whole_tokens_and_nothing_beside_them() -> None:
    x = torch.zeros(6, 16, dtype=torch.bfloat16, device="cuda")
    rows = {"x": x.data_ptr(), "x_stride": 48, "out": x.data_ptr(), "out_stride": 48}
    given = {**rows, "norm_weight": x.data_ptr(), "heads": 3, "m": 6, "k": 16}
    other = x.data_ptr()
    for kind, changes in (
        ("layer_norm", {"m": 5}),
        ("layer_norm", {"n_active": other}),
        ("layer_norm", {"residual": other, "residual_out": other}),
        ("rms_norm", {}),
        ("rms_norm", {"heads": 1, "norm_bias": other}),
    ):
        (entry,) = build([plan(Quantize(kind=kind, in_dtype="bf16", out_dtype="bf16"))])
        library = _C.Library(str(entry.library))
        stream = torch.cuda.current_stream().cuda_stream
        with pytest.raises(RuntimeError, match="invalid argument"):
            library.launch(**{**given, **changes}, stream=stream)
