"""16-bit products by our kernel, on a GPU: sizes, options, bits of rows, and capture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_cases import assert_same_bits
from ops_kernels import FEW_TOKENS, TOKENS, dense_products

from ostinato import ops
from ostinato.jit import loader
from ostinato.jit.errors import MissingKernelError
from ostinato.ops.common.pdl import pdl
from ostinato.ops.linear.precompile import precompile

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16)
# (N, K): every tail of either beside a plain size of the other, and some of both.
SIZES = (
    *((n, 136) for n in (1, 8, 17, 1000, 1003, 4096)),
    *((136, k) for k in (1, 7, 8, 9, 32, 63, 64, 65, 500, 2048)),
    *((1, 1), (17, 15), (1003, 65), (1003, 500)),
)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Have those of the sizes below compiled side by side."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    precompile(dense_products(sms))


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = (torch.randn(rows, k, device=CUDA).to(dtype) for rows in (m, n))
    return x, w


def guarded(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a view [m, n] of NaN that nothing aligns, amid columns of 7."""
    storage = torch.full((m + 2, n + 5), 7.0, dtype=dtype, device=CUDA)
    out = storage[1 : m + 1, 3 : n + 3]
    out.fill_(torch.nan)
    return out


def check(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Demand fp32 sums, rounded once: an ulp of the result, and 2^-22 of magnitudes per 64 of K."""
    if not y.numel():
        return
    exact, sizes = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t()
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    unit = torch.finfo(y.dtype)
    allowed = unit.eps * exact.abs() + sizes * 2.0**-22 * (1 + x.size(1) / 64)
    error = (y.double() - exact).abs()
    assert (error <= allowed + unit.smallest_normal).all(), float((error / allowed).amax())


def check_guard(out: torch.Tensor) -> None:
    m, n = out.shape
    whole = out._base
    assert whole is not None
    whole = whole.clone()
    whole[1 : m + 1, 3 : n + 3] = 7.0
    assert (whole == 7.0).all()


@pytest.mark.parametrize("m", TOKENS)
def test_every_size(m: int) -> None:
    for n, k in SIZES:
        x, w = operands(m, n, k, torch.bfloat16)
        bias = torch.randn(n, device=CUDA).bfloat16()
        packed, out = ops.pack_weight(w), guarded(m, n, torch.bfloat16)
        assert ops.linear(x, packed, bias=bias, out=out) is out
        check(out, x, w, bias)
        check_guard(out)
        assert_same_bits(ops.linear(x, w, bias=bias), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_options(m: int, dtype: torch.dtype) -> None:
    x, w = operands(m, 203, 200, dtype)
    for out_dtype in (dtype, torch.float32):
        of_x = torch.randn(203, device=CUDA).to(dtype)
        biases = [None, of_x, *([torch.randn(203, device=CUDA)] * (out_dtype is torch.float32))]
        for bias in biases:
            for weight in (w, ops.pack_weight(w)):
                out = guarded(m, 203, out_dtype)
                ops.linear(x, weight, bias=bias, out_dtype=out_dtype, out=out)
                check(out, x, w, bias)
                check_guard(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 9, 17, 40, 70, 130, 300])
def test_sums_of_small_integers_are_exact(m: int, dtype: torch.dtype) -> None:
    """Not one element of K may be missing or counted twice."""
    for n, k in ((136, 4096), (1003, 1000), (17, 129)):
        x, w = (torch.randint(-1, 2, (rows, k), device=CUDA).to(dtype) for rows in (m, n))
        for weight in (w, ops.pack_weight(w)):
            y = ops.linear(x, weight, out_dtype=torch.float32)
            assert torch.equal(y, (x.double() @ w.double().t()).float())


@pytest.mark.parametrize("m", FEW_TOKENS)
def test_strides(m: int) -> None:
    """Rows aligned or not, expanded or overlapping; whatever lies beside them is not read."""
    wide_x, wide_w = operands(m, 136, 256, torch.bfloat16)
    wide_x[:, 150:] = wide_w[:, 150:] = torch.nan
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[:, 8:150],
        lambda t: t[:, 5:150],
        lambda t: t[:1, :150].expand(t.size(0), -1),
        lambda t: t.as_strided((min(t.size(0), 3), 40), (8, 1)),
    ]
    for view in views:
        x, w = view(wide_x), view(wide_w)
        y = ops.linear(x, w)
        check(y, x, w)
        assert_same_bits(y, ops.linear(x.contiguous(), w.contiguous()))


@pytest.mark.parametrize("m", FEW_TOKENS)
def test_padding_changes_no_real_row(m: int) -> None:
    x, w = operands(m, 1003, 504, torch.bfloat16)
    packed = ops.pack_weight(w)
    expected, real_x = ops.linear(x, packed), x.clone()
    n_active = torch.full((1,), m, dtype=torch.int32, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, packed, n_active=n_active)
    for real in sorted({0, 1, m // 2, m - 1, m}):
        x.copy_(real_x)
        x[real:] = torch.nan
        n_active.fill_(real)
        y.fill_(torch.nan)
        graph.replay()
        assert_same_bits(y[:real], expected[:real])


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_have_the_same_bits_in_every_call(out_dtype: torch.dtype) -> None:
    for n, k in ((1003, 1000), (4096, 4096), (128, 2048)):
        x, w = operands(1000, n, k, torch.bfloat16)
        weight = ops.pack_weight(w)
        whole = ops.linear(x, weight, out_dtype=out_dtype)
        for m in TOKENS:
            for rows in (slice(m), slice(1000 - m, None)):
                part = ops.linear(x[rows], weight, out_dtype=out_dtype)
                assert_same_bits(part, whole[rows])


@pytest.mark.parametrize("m", [1, 24, 100])
def test_a_thousand_replays_give_the_same_bits(m: int) -> None:
    x, w = operands(m, 2048, 2048, torch.bfloat16)
    weight = ops.pack_weight(w)
    expected = ops.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, weight)
    for _ in range(1000):
        y.fill_(torch.nan)
        graph.replay()
        assert_same_bits(y, expected)


def test_mixed_devices() -> None:
    x, w = operands(2, 3, 16, torch.bfloat16)
    bias, out = torch.ones(3).bfloat16(), torch.ones(2, 3).bfloat16()
    given: dict[str, Any]
    for name, given in (
        ("w", {"w": w.cpu()}),
        ("w", {"w": ops.pack_weight(w.cpu())}),
        ("bias", {"w": w, "bias": bias}),
        ("n_active", {"w": w, "n_active": torch.ones(1).int()}),
        ("out", {"w": w, "out": out}),
    ):
        with pytest.raises(ValueError, match=f"{name}: got a tensor on cpu, expected one on cuda"):
            ops.linear(x, **given)


class Chain:
    """Layers one after another, each normalising what the one before it put out."""

    def __init__(self, m: int, length: int = 100, size: int = 256) -> None:
        self.x = torch.randn(m, size, device=CUDA).bfloat16()
        drawn = (torch.randn(size, size, device=CUDA) / size**0.5 for _ in range(4))
        self._weights = [ops.pack_weight(w.bfloat16()) for w in drawn]
        self._norm = torch.ones(size, device=CUDA).bfloat16()
        self._length = length

    def __call__(self, one_by_one: bool = False) -> torch.Tensor:
        """Launch two kernels a layer; one by one nothing overlaps anything."""
        y = self.x
        for index in range(self._length):
            with pdl(not one_by_one):
                normed = ops.rms_norm(y, self._norm, 1e-5)
                assert isinstance(normed, torch.Tensor)
                if one_by_one:
                    torch.cuda.synchronize()
                y = ops.linear(normed, self._weights[index % 4])
                if one_by_one:
                    torch.cuda.synchronize()
        return y


@pytest.mark.parametrize(
    ("m", "length", "size"), [(1, 100, 256), (9, 100, 256), (33, 100, 256), (64, 40, 4096)]
)
def test_chained_calls_replay_with_changed_inputs(m: int, length: int, size: int) -> None:
    chain = Chain(m, length, size)
    assert_same_bits(chain(), chain(one_by_one=True))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = chain()
    for _ in range(3):
        chain.x.normal_()
        expected = chain(one_by_one=True)
        assert expected.isfinite().all()
        assert expected.any()
        out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(out, expected)


def test_a_capture_without_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands(4, 64, 64, torch.bfloat16)
    packed = ops.pack_weight(w)
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    monkeypatch.setattr(loader, "_loaded", {})
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros(4, 64, dtype=torch.bfloat16, device=CUDA)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out.add_(1.0)
        with pytest.raises(MissingKernelError, match=r"gemm_tiled-bf16-bf16-.*being captured"):
            ops.linear(x, packed, out=out)
    graph.replay()
    assert (out == 1.0).all()
