"""FP8 products with block scales by our kernels, on a GPU: every size, and under capture."""

from __future__ import annotations

import pytest
import torch
from ops_cases import E4M3, FLOATS, assert_same_bits, quantized_randn
from ops_kernels import FEW_TOKENS, TOKENS

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.common.pdl import pdl
from ostinato.ops.linear.block_scales import empty_scales

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("block_kernels")]

CUDA = torch.device("cuda")
# (N, K): every tail of either beside a plain size of the other, and some of both.
SIZES = (
    *((n, 272) for n in (1, 8, 17, 136, 1003, 4096)),
    *((136, k) for k in (1, 15, 17, 127, 128, 129, 1000, 4096)),
    *((1, 1), (17, 15), (1003, 129), (1000, 1000)),
)


# Channels that share a scale.
SHARED = pytest.mark.parametrize("shared", [8, 128])


def operands(
    m: int, n: int, k: int, shared: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, w and distinct scales of every group of a token and of so many channels."""
    x, w = (quantized_randn((rows, k), E4M3).to(CUDA) for rows in (m, n))
    scales = [
        empty_scales(-(-k // 128), columns, CUDA).uniform_(0.01, 0.03)
        for columns in (m, -(-n // shared))
    ]
    return x, w, *scales


def guarded(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a view [m, n] of NaN that nothing aligns, amid columns of 7."""
    storage = torch.full((m + 2, n + 5), 7.0, dtype=dtype, device=CUDA)
    return storage[1 : m + 1, 3 : n + 3].fill_(torch.nan)


def check(
    y: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """Demand the bound of sums of 128 in tensor cores, of fp32 sums of these, and one rounding.

    Tensor cores keep about 13 fraction bits: what is granted is 2^-12 of a group's magnitudes.
    """
    if not y.numel():
        return
    exact = reference.fp8_block_linear(x, w, x_scale, w_scale, dtype=torch.float64)
    sizes = reference.fp8_block_linear(
        x.float().abs().to(E4M3),
        w.float().abs().to(E4M3),
        x_scale,
        w_scale,
        dtype=torch.float64,
    )
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    groups = x_scale.size(0)
    allowed = sizes * (2.0**-12 + groups * 2.0**-23) + exact.abs() * torch.finfo(y.dtype).eps
    error = (y.double() - exact).abs()
    assert (error <= allowed).all(), float((error - allowed).amax())


def check_guard(out: torch.Tensor) -> None:
    m, n = out.shape
    assert out._base is not None
    whole = out._base.clone()
    whole[1 : m + 1, 3 : n + 3] = 7.0
    assert (whole == 7.0).all()


@SHARED
@pytest.mark.parametrize("m", TOKENS)
def test_every_size(m: int, shared: int) -> None:
    for n, k in SIZES:
        x, w, x_scale, w_scale = operands(m, n, k, shared)
        bias = torch.randn(n, device=CUDA).bfloat16()
        packed = ops.pack_weight(w)
        out = guarded(m, n, torch.bfloat16)
        ops.fp8_block_linear(x, packed, x_scale, w_scale, bias=bias, out=out)
        check(out, x, w, x_scale, w_scale, bias)
        check_guard(out)
        how = {"bias": bias, "batch_invariant": True}
        plain = ops.fp8_block_linear(x, w, x_scale, w_scale, **how)
        check(plain, x, w, x_scale, w_scale, bias)
        assert_same_bits(plain, ops.fp8_block_linear(x, packed, x_scale, w_scale, **how))


@SHARED
@pytest.mark.parametrize("m", [1, 9, 17, 40, 70, 130, 300])
def test_sums_of_small_integers_are_exact(m: int, shared: int) -> None:
    """Not one element of K may be missing or counted twice, nor have another's scale."""
    for n, k in ((136, 4096), (1003, 1000), (17, 129)):
        x, w = (torch.randint(-1, 2, (rows, k), device=CUDA).float() for rows in (m, n))
        groups = -(-k // 128)
        scales = [
            2.0 ** torch.randint(-2, 3, (groups, columns), device=CUDA).float()
            for columns in (m, -(-n // shared))
        ]
        exact = reference.fp8_block_linear(x, w, *scales, dtype=torch.float64)
        for weight in (w.to(E4M3), ops.pack_weight(w.to(E4M3))):
            y = ops.fp8_block_linear(x.to(E4M3), weight, *scales, out_dtype=torch.float32)
            assert torch.equal(y.double(), exact)


@SHARED
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_options(m: int, out_dtype: torch.dtype, shared: int) -> None:
    n, k = 203, 400
    x, w, x_scale, w_scale = operands(m, n, k, shared)
    bias = torch.randn(n, device=CUDA)
    rounded = bias.to(out_dtype)
    for weight in (w, ops.pack_weight(w)):
        for b, r in ((None, None), (bias, rounded), (rounded, rounded)):
            out = guarded(m, n, out_dtype)
            ops.fp8_block_linear(x, weight, x_scale, w_scale, bias=b, out_dtype=out_dtype, out=out)
            check(out, x, w, x_scale, w_scale, r)
            check_guard(out)


@pytest.mark.parametrize("m", FEW_TOKENS)
def test_strides(m: int) -> None:
    """Operands and scales aligned or not; whatever lies beside them is not read."""
    n, k = 136, 284
    wide_x, wide_w = (quantized_randn((rows, 512), E4M3).to(CUDA) for rows in (m, n))
    for wide in (wide_x, wide_w):
        wide.view(torch.uint8)[:, 300:] = 0x7F  # NaN
    scales = [torch.full((3, rows + 9), torch.nan, device=CUDA) for rows in (m, n // 8)]
    for first in (4, 5):
        x_scale, w_scale = (wide[:, first : first + wide.size(1) - 9] for wide in scales)
        for scale in (x_scale, w_scale):
            scale.uniform_(0.01, 0.03)
        for begin in (16, 5):
            x, w = wide_x[:, begin : begin + k], wide_w[:, begin : begin + k]
            dense = [t.view(torch.int8).contiguous().view(E4M3) for t in (x, w)]
            y = ops.fp8_block_linear(x, w, x_scale, w_scale, batch_invariant=True)
            check(y, x, w, x_scale, w_scale)
            expected = ops.fp8_block_linear(
                *dense, x_scale.contiguous(), w_scale.contiguous(), batch_invariant=True
            )
            assert_same_bits(y, expected)


@SHARED
def test_rows_have_the_same_bits_in_every_call(shared: int) -> None:
    for n, k in ((1003, 1000), (4096, 4096)):
        x, w, x_scale, w_scale = operands(1000, n, k, shared)
        weight = ops.pack_weight(w)
        whole = ops.fp8_block_linear(x, weight, x_scale, w_scale, batch_invariant=True)
        for m in TOKENS:
            for rows in (slice(m), slice(1000 - m, None)):
                part = ops.fp8_block_linear(
                    x[rows], weight, x_scale[:, rows], w_scale, batch_invariant=True
                )
                assert_same_bits(part, whole[rows])


@SHARED
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_padding_changes_no_real_row(m: int, shared: int) -> None:
    x, w, x_scale, w_scale = operands(m, 1003, 1008, shared)
    packed = ops.pack_weight(w)
    expected = ops.fp8_block_linear(x, packed, x_scale, w_scale)
    real_x, real_scale = x.clone(), x_scale.clone()
    n_active = torch.full((1,), m, dtype=torch.int32, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fp8_block_linear(x, packed, x_scale, w_scale, n_active=n_active)
    for real in sorted({0, 1, m // 2, m - 1, m}):
        x.copy_(real_x)
        x_scale.copy_(real_scale)
        x[real:].view(torch.int8).fill_(127)  # NaN
        x_scale[:, real:].fill_(torch.nan)
        n_active.fill_(real)
        y.fill_(torch.nan)
        graph.replay()
        assert_same_bits(y[:real], expected[:real])


class Chain:
    """Layers one after another, each quantising what the one before it put out."""

    def __init__(self, m: int, shared: int, length: int = 60, size: int = 1024) -> None:
        self.x = torch.randn(m, size, device=CUDA).bfloat16()
        self._norm = torch.rand(size, device=CUDA).bfloat16() + 0.5
        self._weights = [
            ops.pack_weight(quantized_randn((n, size), E4M3).to(CUDA))
            for n in (size, 2 * size, size)
        ]
        unit = size**-0.5
        self._scales = [
            empty_scales(size // 128, w.n // shared, CUDA).uniform_(0.5 * unit, 1.5 * unit)
            for w in self._weights
        ]
        self._length = length

    def __call__(self, wait: bool = False) -> torch.Tensor:
        """Launch two kernels a layer, of all three kinds; `wait` lets nothing overlap."""
        y, residual = self.x, self.x
        for index in range(self._length):
            kind = index % 3
            w, w_scale = self._weights[kind], self._scales[kind]
            with pdl(not wait):
                if kind == 0:
                    codes, scale = ops.quantize_per_group(y)
                elif kind == 1:
                    codes, scale, residual = ops.rms_norm_quantize_per_group(
                        y, self._norm, 1e-6, residual=residual
                    )
                    residual = residual.clamp(-4, 4)
                else:
                    codes, scale = ops.silu_mul_quantize_per_group(y, discard_x=True)
                if wait:
                    torch.cuda.synchronize()
                y = ops.fp8_block_linear(codes, w, scale, w_scale, batch_invariant=True)
                if wait:
                    torch.cuda.synchronize()
        return y


@SHARED
@pytest.mark.parametrize("m", [1, 9, 20, 33, 64, 130])
def test_a_chain_replays_with_changed_inputs(m: int, shared: int) -> None:
    chain = Chain(m, shared)
    assert_same_bits(chain(), chain(wait=True))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out = chain()
    for _ in range(3):
        chain.x.normal_()
        expected = chain(wait=True)
        assert expected.isfinite().all()
        assert expected.any()
        out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(out, expected)


@SHARED
def test_a_thousand_repeats_have_the_same_bits(shared: int) -> None:
    for m in (1, 16, 64, 128, 500):
        x, w, x_scale, w_scale = operands(m, 1536, 2048, shared)
        packed = ops.pack_weight(w)
        for invariant in (False, True):
            how = {"batch_invariant": invariant}
            expected = ops.fp8_block_linear(x, packed, x_scale, w_scale, **how)
            for _ in range(200):
                got = ops.fp8_block_linear(x, packed, x_scale, w_scale, **how)
                assert torch.equal(got, expected)


def test_both_ways_to_store_scales_give_the_same_bits() -> None:
    """Of tiles that begin within a block of channels, too."""
    for m, n, k in ((1, 1003, 1000), (20, 520, 513), (70, 4096, 700), (300, 3000, 4096)):
        x, w, x_scale, of_blocks = operands(m, n, k, 128)
        of_channels = of_blocks.repeat_interleave(16, 1)[:, : -(-n // 8)].contiguous()
        for weight in (w, ops.pack_weight(w)):
            got = ops.fp8_block_linear(x, weight, x_scale, of_blocks, batch_invariant=True)
            want = ops.fp8_block_linear(x, weight, x_scale, of_channels, batch_invariant=True)
            assert_same_bits(got, want)


# Of every way in which rows are shared: a warp, a CTA, several, one that reads the row twice; with
# and without whole vectors.
LENGTHS = (1, 2, 7, 8, 63, 129, 200, 257, 1000, 1024, 4096, 5121, 8192, 14336, 16388, 20000, 40000)
ROWS = [(3, k) for k in LENGTHS] + [
    *((m, 4096) for m in (1, 64, 1030)),
    *((m, 14336) for m in (1, 20, 60, 140)),
    *((300, 1000), (270, 8192)),
]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_quantised_groups_are_those_of_the_cpu(
    dtype: torch.dtype, shape: tuple[int, int], power_of_two: bool
) -> None:
    x = (torch.randn(shape) * torch.linspace(0.1, 9, shape[1])).to(dtype)
    values, scale = ops.quantize_per_group(x.to(CUDA), power_of_two=power_of_two)
    expected, expected_scale = ops.quantize_per_group(x, power_of_two=power_of_two)
    assert_same_bits(values.cpu(), expected)
    assert_same_bits(scale.cpu(), expected_scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_norms_and_gates_of_groups_are_those_of_rows(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """What is quantised has the bits that other kernels quantise by row, if those are fp32."""
    x, residual = (torch.randn(shape, device=CUDA).to(dtype) for _ in range(2))
    weight = torch.rand(shape[1], device=CUDA).to(dtype)
    values, scale, total = ops.rms_norm_quantize_per_group(x, weight, 1e-5, residual=residual)
    assert_same_bits(total, x + residual)
    if dtype is torch.float32:
        normed = ops.rms_norm(total, weight, 1e-5)
        assert isinstance(normed, torch.Tensor)
        want, want_scale = ops.quantize_per_group(normed)
        assert_same_bits(values, want)
        assert_same_bits(scale, want_scale)
    again, scale_again = ops.rms_norm_quantize_per_group(total, weight, 1e-5)
    assert_same_bits(again, values)
    assert_same_bits(scale_again, scale)
    gates = torch.randn(shape[0], 2 * shape[1], device=CUDA).to(dtype)
    want, want_scale = ops.silu_mul_quantize_per_group(gates)
    if dtype is torch.float32:
        expected, expected_scale = ops.quantize_per_group(ops.silu_mul(gates))
        assert_same_bits(want, expected)
        assert_same_bits(want_scale, expected_scale)
    values, scale = ops.silu_mul_quantize_per_group(gates.clone(), discard_x=True)
    assert_same_bits(values, want)
    assert_same_bits(scale, want_scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("k", [7, 200, 1000, 4096, 8192, 14336, 20000])
def test_a_row_does_not_depend_on_the_rows_around_it(dtype: torch.dtype, k: int) -> None:
    x = torch.randn(1100, 2 * k, device=CUDA).to(dtype)
    weight = torch.rand(k, device=CUDA).to(dtype)
    calls = (
        lambda x: ops.quantize_per_group(x[:, :k]),
        lambda x: ops.rms_norm_quantize_per_group(x[:, :k], weight, 1e-6),
        ops.silu_mul_quantize_per_group,
    )
    for call in calls:
        values, scale = call(x)
        for first, end in [(0, 1), (3, 11), (5, 71), (40, 180), (7, 300), (1, 1090)]:
            part, of_part = call(x[first:end])
            assert_same_bits(part, values[first:end])
            assert_same_bits(of_part, scale[:, first:end])


@pytest.mark.parametrize("k", [61, 1024, 4096, 14336, 40000])
def test_padding_is_left_out(k: int) -> None:
    x, n_active = torch.randn(20, k, device=CUDA).bfloat16(), torch.tensor([7]).int().to(CUDA)
    expected, want_scale = ops.quantize_per_group(x)
    x[7:] = torch.nan
    values, scale = ops.quantize_per_group(x, n_active=n_active)
    assert_same_bits(values[:7], expected[:7])
    assert_same_bits(scale[:, :7], want_scale[:, :7])
