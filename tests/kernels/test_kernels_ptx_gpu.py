"""Row kernels compiled for sm_80, as PTX, on a later GPU: the bits of the GPU's own build.

Without clusters, programmatic launches and the instruction that rounds to e4m3 they take other
ways, by which no result may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from append_cases import WRITTEN, Case, on_gpu, written_copies
from ops_cases import E4M3, FLOATS, assert_same_bits
from ops_kernels import plans_of_earlier_gpus

from ostinato import ops
from ostinato.jit import compiler, loader
from ostinato.jit.targets import Target, target_named
from ostinato.ops.linear.quantize_cuda import GATED

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

CUDA = torch.device("cuda")
EARLIER = target_named("compute_80")
QUANTIZED = (torch.int8, E4M3)
Outputs = list[torch.Tensor]
Both = Callable[[Callable[[], Outputs]], None]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compiler.build([plan for plan in plans_of_earlier_gpus() if plan.target == EARLIER])


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    """Give a function that demands the same bits of a call with either build."""

    def compare(call: Callable[[], Outputs]) -> None:
        own = call()
        asked = []

        def earlier(device: int) -> Target:
            asked.append(device)
            return EARLIER

        with monkeypatch.context() as patch:
            patch.setattr(loader, "_loaded", {})
            patch.setattr(loader, "target_for", earlier)
            other = call()
        assert asked, "no kernel was loaded"
        assert len(own) == len(other)
        for expected, got in zip(own, other, strict=True):
            assert_same_bits(got, expected)

    yield compare
    torch.cuda.synchronize()


def rows(m: int, k: int, dtype: torch.dtype, *, odd_values: bool = False) -> torch.Tensor:
    """Return x [m, k] of all magnitudes; with odd values, of every kind in the first rows."""
    x = torch.randn(m, k) * torch.logspace(-6, 4, m).unsqueeze(1)
    if odd_values:
        nan, inf = float("nan"), float("inf")
        x[0, :8] = torch.tensor([nan, -nan, inf, -inf, 0.0, -0.0, 1e-30, -1e-30])
        x[1 % m] = 0.0
    return x.to(CUDA, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [61, 4096, 20000])
def test_embed(both: Both, dtype: torch.dtype, dim: int) -> None:
    table = rows(300, dim, dtype)
    tokens = torch.randint(-5, 310, (33,), device=CUDA)  # some are out of range
    sets = torch.randint(8, (33,), device=CUDA)

    def call() -> Outputs:
        seen = torch.zeros(8, 300, dtype=torch.bool, device=CUDA)
        return [ops.embed(tokens, table, seen=seen, seen_rows=sets), seen]

    both(call)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [64, 100])
def test_merge_states(both: Both, dtype: torch.dtype, dim: int) -> None:
    o_a, o_b = (torch.randn(70, 6, dim).to(CUDA, dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(70, 6).to(CUDA) * 5 for _ in range(2))
    lse_a[:9] = -torch.inf
    lse_b[5:12] = -torch.inf
    both(lambda: list(ops.merge_states(o_a, lse_a, o_b, lse_b)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("batch", "vocabulary"), [(1, 128256), (5, 32003), (200, 32000)])
def test_sample(both: Both, dtype: torch.dtype, batch: int, vocabulary: int) -> None:
    logits = (torch.randn(batch, vocabulary) * 3).to(CUDA, dtype)
    logits[-1] = 1.0  # all alike
    seen = torch.rand(batch, vocabulary, device=CUDA) < 0.1

    def parameter(*values: float) -> torch.Tensor:
        return torch.tensor(values, device=CUDA).repeat(batch)[:batch]

    both(
        lambda: [
            ops.sample(
                logits,
                temperature=parameter(0.8, 0.0, 1.5, 0.01),
                top_k=parameter(0, 50, 3).to(torch.int32),
                top_p=parameter(0.9, 1.0),
                min_p=parameter(0.0, 0.02),
                seeds=torch.arange(batch, device=CUDA),
                counters=torch.full((batch,), counter, device=CUDA),
                repetition_penalty=parameter(1.0, 1.2, 0.7),
                seen=seen,
            )
            for counter in range(8)
        ]
    )


_APPEND = (
    *(
        Case(dtype=dtype, cache_dtype=cache, norms=("same", "fp32"))
        for dtype in FLOATS
        for cache in (None, *QUANTIZED)
    ),
    *(Case(cache_dtype=dtype, scales=("head", "one")) for dtype in QUANTIZED),
    Case(cache_dtype=E4M3, interleaved=True, dim=80, tokens=70),
    Case(cache_dtype=E4M3, dim=1000, norms=("same", "same")),
)


@pytest.mark.parametrize("case", _APPEND, ids=str)
def test_append_kv(both: Both, case: Case) -> None:
    arguments = on_gpu(case.build())

    def call() -> Outputs:
        given: dict[str, Any] = {**arguments, **written_copies(arguments)}
        q = ops.append_kv(**given)
        assert q is not None
        return [q, *(given[name] for name in WRITTEN if name in given)]

    both(call)


# (m, k): each way in which rows are shared among warps, CTAs and clusters.
_SHAPES = ((3, 200), (3, 4096), (2, 14336), (20, 14336), (1030, 4096), (140, 14336), (2, 40001))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_quantize(both: Both, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = rows(*shape, dtype, odd_values=True)
    scale = torch.tensor(0.03, device=CUDA)

    def call() -> Outputs:
        found = []
        for to in QUANTIZED:
            scales = torch.empty(len(x), device=CUDA)
            found += [ops.quantize_per_tensor(x, scale, to, scale_out=scales), scales]
            found += ops.quantize_per_token(x, to)
        return found

    both(call)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [*((dtype, dtype) for dtype in FLOATS), *((dtype, torch.float32) for dtype in FLOATS[1:])],
)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_rms_norm(
    both: Both, dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, residual = rows(*shape, dtype, odd_values=True), rows(*shape, dtype)
    weight = torch.randn(shape[1]).to(CUDA, weight_dtype)

    def call() -> Outputs:
        found = [ops.rms_norm(x, weight, 1e-5), *ops.rms_norm(x, weight, 1e-5, residual=residual)]
        for to in QUANTIZED:
            found += ops.rms_norm_quantize(x, weight, 1e-5, to, residual=residual)
        return found

    both(call)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_layer_norm(both: Both, weight_dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = (rows(*shape, torch.bfloat16, odd_values=odd) for odd in (True, False))
    weight, bias = torch.randn(2, shape[1]).to(CUDA, weight_dtype)

    def call() -> Outputs:
        given = {"bias": bias, "residual": residual}
        found = [ops.layer_norm(x, weight, 1e-5), *ops.layer_norm(x, weight, 1e-5, **given)]
        for to in QUANTIZED:
            found += ops.layer_norm_quantize(x, weight, 1e-5, to, **given)
        found += ops.layer_norm_quantize_per_group(x, weight, 1e-5, **given)
        return found

    both(call)


@pytest.mark.parametrize("kind", ["gelu_tanh_mul", "gelu_mul", "gelu_tanh", "gelu", "relu2"])
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_activations(both: Both, kind: str, shape: tuple[int, int]) -> None:
    m, k = shape
    x = rows(m, 2 * k if kind in GATED else k, torch.bfloat16, odd_values=True)

    def call() -> Outputs:
        found = [ops.activation(x, kind), *ops.activation_quantize_per_group(x, kind)]
        for to in QUANTIZED:
            found += ops.activation_quantize(x, kind, to)
        return found

    both(call)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_silu_mul(both: Both, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    m, k = shape
    x = rows(m, 2 * k, dtype, odd_values=True)

    def call() -> Outputs:
        found = [ops.silu_mul(x)]
        for to in QUANTIZED:
            found += ops.silu_mul_quantize(x, to)
        return found

    both(call)
