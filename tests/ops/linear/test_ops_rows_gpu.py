"""The kernels behind norms and activations on a GPU: right numbers, in one launch each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops_cases import FLOATS, assert_close, assert_same_bits

from ostinato import ops
from ostinato.graphs import BatchView, BufferSpec, GraphRunner, StaticBuffers
from ostinato.ops import reference
from ostinato.ops.common.pdl import pdl
from ostinato.ops.linear import quantize_cuda
from ostinato.ops.linear.quantize_cuda import ACTIVATIONS, GATED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

CUDA = torch.device("cuda")
# Of every way in which rows are shared: a warp, a CTA, several, one that reads the row twice; with
# and without whole vectors.
LENGTHS = (1, 2, 7, 8, 63, 200, 257, 1000, 1024, 4096, 5121, 8192, 14336, 16388, 20000, 40000)
SHAPES = [(3, k) for k in LENGTHS] + [
    *((m, 4096) for m in (1, 64, 1030)),
    *((m, 14336) for m in (1, 20, 60, 140)),
    *((300, 1000), (270, 8192), (1, 65536)),
]


def ordered(x: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of x's numbers, neighbours one apart; both zeros are 0."""
    bits = x.view({2: torch.int16, 4: torch.int32}[x.itemsize]).long()
    return torch.where(bits < 0, -(bits & (1 << 8 * x.itemsize - 1) - 1), bits)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Demand the numbers of the CPU, whose sums have another order and whose exp is another.

    In 16 bits they are the same but for numbers that lie between two of these; fp32 may be a few
    of its units off.
    """
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    off = (ordered(got.cpu()) - ordered(want)).abs()
    if got.dtype is torch.float32:
        assert (off <= 8).all(), off.max()
        return
    assert (off <= 1).all(), off.max()
    assert (off > 0).sum() <= 2 + off.numel() / 500


def inside(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory full of NaN and a tensor in the middle of it, at an odd place."""
    around = torch.full((rows + 2, columns + 18), torch.nan, dtype=dtype, device=CUDA)
    return around, around[1:-1, 9:-9]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_is_that_of_the_cpu(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, shape: tuple[int, int]
) -> None:
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1]).to(weight_dtype or dtype)
    on_cuda = x.to(CUDA), weight.to(CUDA), 1e-5
    out = torch.full(shape, torch.nan, dtype=dtype, device=CUDA)
    assert ops.rms_norm(*on_cuda, out=out) is out
    assert_near(out, ops.rms_norm(x, weight, 1e-5))
    want, want_total = ops.rms_norm(x, weight, 1e-5, residual=residual)
    got, total = ops.rms_norm(*on_cuda, residual=residual.to(CUDA))
    assert_same_bits(total.cpu(), want_total)
    assert_near(got, want)
    assert_same_bits(ops.rms_norm(total, *on_cuda[1:]), got)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul_is_that_of_the_cpu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=CUDA)
    assert ops.silu_mul(x.to(CUDA), out=out) is out
    assert_near(out, ops.silu_mul(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_is_that_of_fp64(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, shape: tuple[int, int]
) -> None:
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[1]).to(weight_dtype or dtype) for _ in range(2))
    on_cuda = x.to(CUDA), weight.to(CUDA), 1e-5
    out = torch.full(shape, torch.nan, dtype=dtype, device=CUDA)
    given = {"bias": bias.to(CUDA)}
    assert ops.layer_norm(*on_cuda, **given, out=out) is out
    on_cpu = {"bias": bias}
    assert_close(out.cpu(), lambda dt: reference.layer_norm(x, weight, 1e-5, **on_cpu, dtype=dt))
    got, total = ops.layer_norm(*on_cuda, **given, residual=residual.to(CUDA))
    assert_same_bits(total.cpu(), x + residual)
    assert_same_bits(ops.layer_norm(total, *on_cuda[1:], **given), got)
    plain = ops.layer_norm(*on_cuda)
    assert_close(plain.cpu(), lambda dt: reference.layer_norm(x, weight, 1e-5, dtype=dt))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "k"), [(1, 64), (3, 61), (8, 128), (5, 257), (2, 9000)])
def test_heads_have_weights_of_their_own_on_a_gpu(dtype: torch.dtype, heads: int, k: int) -> None:
    around, x = inside(7, heads * k, dtype)
    x.copy_(torch.randn(7, heads * k))
    weight, bias = (torch.randn(heads, k).to(dtype).to(CUDA) for _ in range(2))
    _, out = inside(7, heads * k, dtype)
    whole, rows = out.unflatten(1, (heads, k)), x.unflatten(1, (heads, k))
    assert ops.layer_norm(rows, weight, 1e-5, bias=bias, out=whole) is whole
    for head in range(heads):
        alone = ops.layer_norm(rows[:, head], weight[head], 1e-5, bias=bias[head])
        assert_same_bits(whole[:, head].contiguous(), alone)
    assert around.isnan().sum() == around.numel() - x.numel()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_activations_are_those_of_fp64(
    dtype: torch.dtype, kind: str, shape: tuple[int, int]
) -> None:
    m, k = shape
    x = (torch.randn(m, 2 * k if kind in GATED else k) * 4).to(dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=CUDA)
    assert ops.activation(x.to(CUDA), kind, out=out) is out
    assert_close(out.cpu(), lambda dt: reference.activation(x, kind, dtype=dt))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 1000, 4096, 20000])
def test_no_rows(dtype: torch.dtype, columns: int) -> None:
    x = torch.empty(0, 2 * columns, dtype=dtype, device=CUDA)
    weight = torch.ones(2 * columns, dtype=dtype, device=CUDA)
    normed, total = ops.rms_norm(x, weight, 1e-6, residual=x)
    assert normed.shape == total.shape == x.shape
    assert ops.silu_mul(x).shape == (0, columns)
    assert ops.layer_norm(x, weight, 1e-6, bias=weight).shape == x.shape
    assert ops.activation(x, "relu2").shape == x.shape


Op = Callable[..., tuple[torch.Tensor, ...]]


def norm_op(k: int, dtype: torch.dtype, *, residual: bool) -> Op:
    """Return the norm of rows of k, and of their sums with themselves turned round if wanted."""
    weight = torch.randn(k).to(dtype).to(CUDA)

    def run(x: torch.Tensor, **options: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not residual:
            return (ops.rms_norm(x, weight, 1e-6, **options),)
        return ops.rms_norm(x, weight, 1e-6, residual=x.flip(1), **options)

    return run


def layer_norm_op(k: int, dtype: torch.dtype) -> Op:
    weight, bias = torch.randn(2, k).to(dtype).to(CUDA)

    def run(x: torch.Tensor, **options: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.layer_norm(x, weight, 1e-6, bias=bias, residual=x.flip(1), **options)

    return run


def activation_op(kind: str) -> Op:
    return lambda x, **options: (ops.activation(x, kind, **options),)


def ops_of(k: int, dtype: torch.dtype) -> list[tuple[Op, int]]:
    """Return all there is to do with rows of k, and how many columns each takes."""
    return [
        (norm_op(k, dtype, residual=False), k),
        (norm_op(k, dtype, residual=True), k),
        (lambda x, **options: (ops.silu_mul(x, **options),), 2 * k),
        (layer_norm_op(k, dtype), k),
        *((activation_op(kind), 2 * k) for kind in ("gelu_tanh_mul", "gelu_mul")),
        *((activation_op(kind), k) for kind in ("gelu_tanh", "gelu", "relu2")),
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("m", "k"), [(3, 96), (5, 1024), (300, 1000), (1030, 4096), (9, 14336), (3, 20000), (2, 40000)]
)
def test_places_and_strides_change_no_bit_and_nothing_around(
    dtype: torch.dtype, m: int, k: int
) -> None:
    for op, columns in ops_of(k, dtype):
        x = torch.randn(m, columns, device=CUDA).to(dtype)
        want = op(x)
        _, elsewhere = inside(m, columns, dtype)
        elsewhere.copy_(x)
        assert all(map(torch.equal, op(elsewhere), want))
        apart = torch.randn(m, 3, columns, device=CUDA).to(dtype)[:, 1]
        apart.copy_(x)
        around, out = inside(m, k, dtype)
        results = op(apart, out=out)
        assert results[0] is out
        assert all(map(torch.equal, results, want))
        assert around.isnan().sum() == around.numel() - out.numel()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("k", [7, 200, 1000, 4096, 8192, 14336, 20000])
def test_a_row_does_not_depend_on_the_rows_around_it_nor_on_the_call(
    dtype: torch.dtype, k: int
) -> None:
    for op, columns in ops_of(k, dtype):
        x = torch.randn(1100, columns, device=CUDA).to(dtype)
        want = op(x)
        assert all(map(torch.equal, op(x), want))
        for first, end in [(0, 1), (3, 11), (5, 21), (5, 71), (40, 180), (7, 300), (1, 1090)]:
            got = op(x[first:end])
            assert all(torch.equal(a, b[first:end]) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("k", [8, 200, 4096, 14336, 20000, 40001])
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype, k: int) -> None:
    for op, columns in ops_of(k, dtype):
        x = torch.randn(6, columns).to(dtype)
        clean = op(x.to(CUDA))
        for row, bad in ((1, torch.nan), (3, torch.inf), (4, -torch.inf)):
            x[row, columns // 3] = bad
        got = op(x.to(CUDA))
        for a, b in zip(got, clean, strict=True):
            assert torch.equal(a[[0, 2, 5]], b[[0, 2, 5]])
            assert b.isfinite().all()
    weight = torch.randn(k).to(dtype)
    rows = x[:, :k]
    even = x[:, : x.size(1) // 2 * 2]  # [gate | up]
    for on_cuda, on_cpu in (
        (ops.rms_norm(rows.to(CUDA), weight.to(CUDA), 0.0), ops.rms_norm(rows, weight, 0.0)),
        (ops.silu_mul(even.to(CUDA)), ops.silu_mul(even)),
        (ops.layer_norm(rows.to(CUDA), weight.to(CUDA), 0.0), ops.layer_norm(rows, weight, 0.0)),
        *(
            (ops.activation(even.to(CUDA), kind), ops.activation(even, kind))
            for kind in ACTIVATIONS
        ),
    ):
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(on_cuda).cpu(), kind(on_cpu))
        assert torch.equal((on_cuda == 0).cpu(), on_cpu == 0)


@pytest.mark.parametrize("k", [4, 130, 4096, 40000])
def test_norms_of_rows_at_the_ends_of_fp32(k: int) -> None:
    signs = torch.where(torch.rand(8, k) < 0.5, -1.0, 1.0)
    sizes = torch.tensor([3e38, 1e20, 1e18, 1.0, 1e-18, 1e-21, 1e-38, 0.0])
    x, weight = signs * sizes[:, None], torch.ones(k)
    for eps in (0.0, 1e-6):
        got = ops.rms_norm(x.to(CUDA), weight.to(CUDA), eps).cpu()
        want = ops.rms_norm(x, weight, eps)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gates_of_all_sizes(dtype: torch.dtype) -> None:
    gates = torch.tensor([0.0, 1e-7, 0.3, 2.0, 17.0, 60.0, 79.9, 80.1, 87.0, 88.6, 89.0, 110, 6e4])
    gates = torch.cat([gates, -gates, torch.tensor([torch.inf])]).repeat(2, 3)
    x = torch.cat([gates, torch.randn_like(gates)], dim=1).to(dtype)
    got, want = ops.silu_mul(x.to(CUDA)).cpu(), ops.silu_mul(x)
    finite = want.isfinite()
    assert torch.equal(got[~finite], want[~finite])
    rtol = torch.finfo(dtype).eps if dtype is not torch.float32 else 1e-6
    # Where the CPU keeps subnormal results, so does the kernel.
    atol = float(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    torch.testing.assert_close(got[finite], want[finite], rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (64, 4096), (5, 61), (2, 14336), (3, 20000)])
def test_one_graph_serves_new_rows_and_weights(dtype: torch.dtype, m: int, k: int) -> None:
    x, residual = (torch.zeros(m, 2 * k, dtype=dtype, device=CUDA) for _ in "xr")
    weight = torch.ones(2 * k, dtype=dtype, device=CUDA)
    out = torch.zeros(m, k, dtype=dtype, device=CUDA)

    def step() -> torch.Tensor:
        # Each is the predecessor of the next, and the weight is made by the one in front.
        normed, total = ops.rms_norm(x, weight * 2, 1e-6, residual=residual)
        ops.silu_mul(normed, out=out)
        return total

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = step()
    for _ in range(20):
        for tensor in (x, residual, weight):
            tensor.normal_()
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone(), total.clone()
        with pdl(False):
            want_total = step()
        assert_same_bits(replayed[1], want_total)
        assert_same_bits(replayed[0], out)


def test_each_is_one_kernel_and_what_follows_overlaps_it() -> None:
    weight = torch.ones(256, dtype=torch.bfloat16, device=CUDA)

    def step(batch: BatchView) -> torch.Tensor:
        normed, _ = ops.rms_norm(batch.x, weight, 1e-6, residual=batch.x)
        return ops.silu_mul(normed)

    buffers = StaticBuffers({"x": BufferSpec((256,), torch.bfloat16, 1.0)}, 8, CUDA)
    with GraphRunner(step, buffers, memory={"weight": weight}) as runner:
        report = runner.capture([1, 8], progress=False, audit="strict")
    for graph in report.graphs:
        assert graph.nodes == {"kernel": 2}
        assert graph.pdl_edges == 1, str(report)
        assert all("quantize_rows" in name for name in graph.kernels or {}), graph.kernels


def test_a_chain_of_launches_waits_for_each_one() -> None:
    results = []
    for overlap in (True, False):
        torch.manual_seed(1)
        base = 10 * torch.randn(64, 2048, device=CUDA)  # or one element would outgrow all others
        x, ones = base, torch.ones(2048, device=CUDA)
        weight = ones
        with pdl(overlap):
            for _ in range(100):
                # The launch in front wrote the weight of this one, which let the next one start.
                x, _ = ops.rms_norm(x, weight, 1e-6, residual=base)
                weight = ops.rms_norm(x, ones, 1e-6, residual=base)[0][0]
        assert x.isfinite().all()
        results.append((x, weight))
    for overlapped, alone in zip(*results, strict=True):
        assert torch.equal(overlapped, alone)


def test_bad_input_is_refused_before_anything_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_cuda, "load", lambda *_, **__: pytest.fail("launches"))
    x = torch.zeros(3, 8, device=CUDA)
    with pytest.raises(ValueError, match="weight: got a tensor on cpu, expected one on cuda:0"):
        ops.rms_norm(x, torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="out: got shape"):
        ops.silu_mul(x, out=x)
