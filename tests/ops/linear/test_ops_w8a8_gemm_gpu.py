"""W8A8 products by our kernels, on a GPU: every size against exact sums, and under capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_cases import E4M3, FLOATS, assert_same_bits, quantized_randn
from ops_kernels import FEW_TOKENS, TOKENS

from ostinato import ops
from ostinato.jit import loader
from ostinato.jit.errors import MissingKernelError
from ostinato.ops.common.pdl import pdl

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

CUDA = torch.device("cuda")
DTYPES = (torch.int8, E4M3)
# (N, K): every tail of either beside a plain size of the other, and some of both.
SIZES = (
    *((n, 272) for n in (1, 8, 17, 1000, 1003, 4096)),
    *((136, k) for k in (1, 15, 16, 17, 64, 127, 128, 129, 1000, 4096)),
    *((1, 1), (17, 15), (1003, 129), (1003, 1000)),
)


def operands(
    m: int, n: int, k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, w and distinct scales of every token and channel."""
    x, w = (quantized_randn((rows, k), dtype).to(CUDA) for rows in (m, n))
    x_scale, w_scale = (torch.rand(rows, device=CUDA) / 64 + 0.01 for rows in (m, n))
    return x, w, x_scale, w_scale


def guarded(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a view [m, n] of NaN that nothing aligns, amid columns of 7."""
    storage = torch.full((m + 2, n + 5), 7.0, dtype=dtype, device=CUDA)
    out = storage[1 : m + 1, 3 : n + 3]
    out.fill_(torch.nan)
    return out


def check_guard(out: torch.Tensor) -> None:
    m, n = out.shape
    whole = out._base
    assert whole is not None
    whole = whole.clone()
    whole[1 : m + 1, 3 : n + 3] = 7.0
    assert (whole == 7.0).all()


def check(
    y: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> None:
    """Demand exact sums and one ulp after the epilogue of int8, and of e4m3 the bound of its sums.

    Tensor cores keep about 13 fraction bits of a running FP8 sum: what is granted is 2^-12 of the
    sum of magnitudes, and as much again for every 1024 of K.
    """
    if not y.numel():
        return
    shifted = x.double() if zero is None else x.double() - zero.reshape(-1, 1)
    acc = shifted @ w.double().t()
    scaled = w_scale * acc.float()
    exact = x_scale.reshape(-1, 1).double() * scaled.double()
    terms = exact.abs()
    if bias is not None:
        exact = exact + bias.double()
        terms = terms + bias.double().abs()
    expected = exact.float().to(y.dtype)
    unit = torch.finfo(y.dtype)
    binade = 2.0 ** (torch.frexp(expected.double()).exponent - 1).double()
    binade = binade.where(expected != 0, 0.0)
    allowed = unit.eps * binade.clamp(min=unit.smallest_normal) + 2.0**-22 * terms
    if x.dtype is E4M3:
        magnitudes = x.double().abs() @ w.double().abs().t()
        factor = 2.0**-12 * (1 + x.size(1) / 1024)
        allowed = allowed + factor * magnitudes * x_scale.reshape(-1, 1) * w_scale
    error = (y.double() - expected.double()).abs()
    assert (error <= allowed).all(), float((error - allowed).amax())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", TOKENS)
def test_every_size(m: int, dtype: torch.dtype) -> None:
    for n, k in SIZES:
        x, w, x_scale, w_scale = operands(m, n, k, dtype)
        bias = torch.randn(n, device=CUDA).bfloat16()
        packed = ops.pack_weight(w)
        out = guarded(m, n, torch.bfloat16)
        assert ops.w8a8_linear(x, packed, x_scale, w_scale, bias=bias, out=out) is out
        check(out, x, w, x_scale, w_scale, bias=bias)
        check_guard(out)
        options = {"bias": bias, "batch_invariant": True}
        plain = ops.w8a8_linear(x, w, x_scale, w_scale, **options)
        check(plain, x, w, x_scale, w_scale, bias=bias)
        assert_same_bits(plain, ops.w8a8_linear(x, packed, x_scale, w_scale, **options))
        if dtype is torch.int8:
            assert_same_bits(plain, out)


@pytest.mark.parametrize("m", TOKENS)
def test_fp8_with_fp32_sums(m: int) -> None:
    for n, k in ((136, 4096), (1003, 129), (17, 15)):
        x, w, x_scale, w_scale = operands(m, n, k, E4M3)
        for weight in (w, ops.pack_weight(w)):
            y = ops.w8a8_linear(x, weight, x_scale, w_scale, fast_accum=False)
            check(y, x, w, x_scale, w_scale)


@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("m", [1, 9, 17, 40, 70, 130, 300])
def test_fp8_sums_of_small_integers_are_exact(m: int, fast_accum: bool) -> None:
    """Not one element of K may be missing or counted twice: 13 bits hold these sums."""
    one = torch.ones((), device=CUDA)
    for n, k in ((136, 4096), (1003, 1000), (17, 129)):
        x, w = (torch.randint(-1, 2, (rows, k), device=CUDA).float() for rows in (m, n))
        options = {"out_dtype": torch.float32, "fast_accum": fast_accum}
        for weight in (w.to(E4M3), ops.pack_weight(w.to(E4M3))):
            y = ops.w8a8_linear(x.to(E4M3), weight, one, one, **options)
            assert torch.equal(y, (x.double() @ w.double().t()).float())


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_options(m: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    n, k = 203, 400
    x, w, x_scale, w_scale = operands(m, n, k, dtype)
    bias = torch.randn(n, device=CUDA)
    rounded = bias.to(out_dtype)
    one = torch.tensor([0.02], device=CUDA)
    for weight in (w, ops.pack_weight(w)):
        for x_s, w_s in ((x_scale, w_scale), (one, w_scale), (x_scale, one), (one, one[0])):
            for b, r in ((None, None), (bias, rounded), (rounded, rounded)):
                out = guarded(m, n, out_dtype)
                ops.w8a8_linear(x, weight, x_s, w_s, bias=b, out_dtype=out_dtype, out=out)
                check(out, x, w, x_s, w_s, bias=r)
                check_guard(out)


@pytest.mark.parametrize("m", FEW_TOKENS)
def test_zero_points(m: int) -> None:
    x, w, x_scale, w_scale = operands(m, 203, 400, torch.int8)
    x.fill_(-128)
    w[:100] = 127
    bias = torch.randn(203, device=CUDA).half()
    per_token = torch.randint(-128, 128, (m,), dtype=torch.int32, device=CUDA)
    sums = w.sum(1, dtype=torch.int32)
    for zero in (per_token, per_token[:1], per_token[0]):
        for weight in (w, ops.pack_weight(w)):
            for w_sum in (None, sums):
                y = ops.w8a8_linear(
                    *(x, weight, x_scale, w_scale),
                    bias=bias,
                    x_zero_point=zero,
                    w_sum=w_sum,
                    out_dtype=torch.float16,
                )
                check(y, x, w, x_scale, w_scale, bias=bias, zero=zero)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_strides(m: int, dtype: torch.dtype) -> None:
    """Rows aligned or not, expanded or overlapping; whatever lies beside them is not read."""
    n = 136
    wide_x, wide_w = (quantized_randn((rows, 512), dtype).to(CUDA) for rows in (m, n))
    if dtype is E4M3:
        wide_x.view(torch.uint8)[:, 300:] = wide_w.view(torch.uint8)[:, 300:] = 0x7F  # NaN
    one = torch.ones((), device=CUDA)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[:, 16:300],
        lambda t: t[:, 5:300],
        lambda t: t[:1, :300].expand(t.size(0), -1),
        lambda t: t.as_strided((t.size(0), 256), (16, 1)),
    ]
    for view in views:
        x, w = view(wide_x), view(wide_w)
        if x.size(1) == 256 and dtype is E4M3:
            continue  # it runs into the NaN
        dense_x, dense_w = (t.view(torch.int8).contiguous().view(dtype) for t in (x, w))
        y = ops.w8a8_linear(x, w, one, one, batch_invariant=True)
        check(y, x, w, one, one)
        assert_same_bits(y, ops.w8a8_linear(dense_x, dense_w, one, one, batch_invariant=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_padding_changes_no_real_row(m: int, dtype: torch.dtype) -> None:
    n, k = 1003, 1008
    x, w, x_scale, w_scale = operands(m, n, k, dtype)
    packed = ops.pack_weight(w)
    expected = ops.w8a8_linear(x, packed, x_scale, w_scale)
    real_x, real_scale = x.clone(), x_scale.clone()
    n_active = torch.full((1,), m, dtype=torch.int32, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.w8a8_linear(x, packed, x_scale, w_scale, n_active=n_active)
    for real in sorted({0, 1, m // 2, m - 1, m}):
        x.copy_(real_x)
        x_scale.copy_(real_scale)
        x[real:].view(torch.int8).fill_(127)  # NaN as e4m3
        x_scale[real:].fill_(torch.nan)
        n_active.fill_(real)
        y.fill_(torch.nan)
        graph.replay()
        assert_same_bits(y[:real], expected[:real])


@pytest.mark.parametrize("fast_accum", [False, True])
def test_fp8_rows_have_the_same_bits_in_every_call(fast_accum: bool) -> None:
    for n, k in ((1003, 1000), (4096, 4096)):
        x, w, x_scale, w_scale = operands(1000, n, k, E4M3)
        weight = ops.pack_weight(w)
        options = {"batch_invariant": True, "fast_accum": fast_accum}
        whole = ops.w8a8_linear(x, weight, x_scale, w_scale, **options)
        for m in TOKENS:
            for rows in (slice(m), slice(1000 - m, None)):
                part = ops.w8a8_linear(x[rows], weight, x_scale[rows], w_scale, **options)
                assert_same_bits(part, whole[rows])


def test_mixed_devices() -> None:
    x, w, x_scale, w_scale = operands(2, 3, 16, torch.int8)
    arguments = {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale}
    zero = torch.zeros((), dtype=torch.int32, device=CUDA)
    for name, extra in (
        ("w", {}),
        ("x_scale", {}),
        ("w_scale", {}),
        ("bias", {"bias": torch.ones(3)}),
        ("x_zero_point", {"x_zero_point": zero}),
        ("w_sum", {"x_zero_point": zero, "w_sum": torch.ones(3).int()}),
        ("out", {"out": torch.ones(2, 3).bfloat16()}),
    ):
        given: dict[str, Any] = {**arguments, **extra}
        given[name] = given[name].cpu()
        with pytest.raises(ValueError, match=f"{name}: got a tensor on cpu, expected one on cuda"):
            ops.w8a8_linear(**given)
    with pytest.raises(ValueError, match="w: got a tensor on cpu"):
        ops.w8a8_linear(x, ops.pack_weight(w.cpu()), x_scale, w_scale)


class Chain:
    """Layers one after another, each quantising what the one before it put out."""

    def __init__(self, m: int, dtype: torch.dtype, length: int = 100, size: int = 256) -> None:
        self.x = torch.randn(m, size, device=CUDA).bfloat16()
        self._weights = [
            ops.pack_weight(quantized_randn((size, size), dtype).to(CUDA)) for _ in range(4)
        ]
        spread = 73.0 if dtype is torch.int8 else 1.0
        self._scale = torch.full((size,), 1 / (size**0.5 * spread), device=CUDA)
        self._dtype, self._length = dtype, length

    def __call__(self) -> torch.Tensor:
        """Launch two kernels a layer."""
        y = self.x
        for index in range(self._length):
            quantized, scale = ops.quantize_per_token(y, self._dtype)
            y = ops.w8a8_linear(quantized, self._weights[index % 4], scale, self._scale)
        return y

    def one_by_one(self) -> torch.Tensor:
        """Do the same with nothing overlapping anything."""
        y = self.x
        for index in range(self._length):
            with pdl(False):
                quantized, scale = ops.quantize_per_token(y, self._dtype)
                torch.cuda.synchronize()
                y = ops.w8a8_linear(quantized, self._weights[index % 4], scale, self._scale)
                torch.cuda.synchronize()
        return y

    def captured(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out = self()
        return graph, out

    def check_replays(self, graph: torch.cuda.CUDAGraph, out: torch.Tensor) -> None:
        for _ in range(3):
            self.x.normal_()
            expected = self.one_by_one()
            assert expected.isfinite().all()
            assert expected.any()
            out.fill_(torch.nan)
            graph.replay()
            assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 9, 33])
def test_200_chained_calls_replay_with_changed_inputs(m: int, dtype: torch.dtype) -> None:
    chain = Chain(m, dtype)
    assert_same_bits(chain(), chain.one_by_one())
    chain.check_replays(*chain.captured())


# Weights of more than a ring are asked for, at the pace at which they land, while x is awaited.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [20, 33, 64, 130])
def test_chained_calls_whose_weights_wait_for_x(m: int, dtype: torch.dtype) -> None:
    chain = Chain(m, dtype, length=40, size=4096)
    assert_same_bits(chain(), chain.one_by_one())
    chain.check_replays(*chain.captured())


@pytest.mark.parametrize("m", [4, 33])
def test_capture_beside_a_thread_that_allocates_and_launches(m: int) -> None:
    chain, other = Chain(m, torch.int8), Chain(m, E4M3, length=5)
    chain()
    expected, stop = other(), threading.Event()
    failures: list[BaseException] = []
    torch.cuda.synchronize()

    def disturb() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    torch.empty(1 << 22, device=CUDA).fill_(1.0)
                    torch.cuda.empty_cache()
                    got = other()
                    stream.synchronize()
                    assert_same_bits(got, expected)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        graphs = [chain.captured() for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert not failures
    for graph, out in graphs:
        chain.check_replays(graph, out)


def test_a_capture_without_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, x_scale, w_scale = operands(4, 64, 64, torch.int8)
    packed = ops.pack_weight(w)
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    monkeypatch.setattr(loader, "_loaded", {})
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros(4, 64, dtype=torch.bfloat16, device=CUDA)
    name = "gemm_small_m-int8-bf16-m8-w1r2x4"
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out.add_(1.0)
        with pytest.raises(MissingKernelError, match=f"{name} .*being captured.* build --only"):
            ops.w8a8_linear(x, packed, x_scale, w_scale, out=out)
        with pytest.raises(MissingKernelError, match="quantize-per_token-bf16-int8"):
            ops.quantize_per_token(out, torch.int8)
    graph.replay()
    assert (out == 1.0).all()
