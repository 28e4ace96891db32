"""A row's, and a sequence's, result is the same to the bit whatever else is in the call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from ops_cases import E4M3, FLOATS, PagedCase, assert_same_bits, int32, quantized_randn

from effort import sampled
from ostinato import ops

pytestmark = pytest.mark.usefixtures("kernels")

invariance = settings(
    max_examples=25,
    # The fixture only names a device; nothing of it changes between examples.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def selections(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Draw a number of rows and some of them, in any order and perhaps repeated."""
    rows = draw(st.integers(1, 20))
    return rows, draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=24))


def check_rows(
    op: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    chosen: list[int],
    *by_row: torch.Tensor,
) -> None:
    """Demand op(*by_row)[chosen] = op(*by_row[chosen]), for each of its results."""
    index = torch.tensor(chosen, device=by_row[0].device)

    def results(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = op(*arguments)
        return result if isinstance(result, tuple) else (result,)

    picked = (x.view(torch.int8)[index].view(E4M3) if x.dtype is E4M3 else x[index] for x in by_row)
    for whole, part in zip(results(*by_row), results(*picked), strict=True):
        if whole.dtype is E4M3:
            whole, part = whole.view(torch.int8), part.view(torch.int8)
        assert_same_bits(part, whole[index])


SIZES = st.sampled_from([1, 3, 8, 33, 100, 257])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@invariance
@given(selection=selections(), columns=SIZES, depth=SIZES, bias=st.booleans())
def test_linear(
    dtype: torch.dtype,
    device: torch.device,
    selection: tuple[int, list[int]],
    columns: int,
    depth: int,
    bias: bool,
) -> None:
    rows, chosen = selection
    x, w = (torch.randn(n, depth).to(dtype).to(device) for n in (rows, columns))
    b = torch.randn(columns).to(dtype).to(device) if bias else None
    check_rows(lambda x: ops.linear(x, w, bias=b), chosen, x)


MODEL_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (9000, 64)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
def test_linear_in_batches_and_chunks(
    dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    """Depths of a model, of which some are divided by the library for some numbers of rows."""
    columns, depth = shape
    x = torch.randn(600, depth).to(dtype).to(device)
    w = torch.randn(columns, depth).to(dtype).to(device)
    whole = ops.linear(x, w)
    for rows in (1, 2, 7, 8, 48, 64, 260, 512):
        assert_same_bits(ops.linear(x[:rows], w), whole[:rows])
        assert_same_bits(ops.linear(x[600 - rows :], w), whole[600 - rows :])


@invariance
@given(cuts=st.lists(st.integers(1, 699), max_size=5), dtype=st.sampled_from(FLOATS))
def test_linear_of_a_prompt_in_chunks(
    device: torch.device, cuts: list[int], dtype: torch.dtype
) -> None:
    x, w = (torch.randn(n, 1536).to(dtype).to(device) for n in (700, 40))
    bounds = [0, *sorted(cuts), 700]
    parts = [ops.linear(x[a:b], w) for a, b in pairwise(bounds)]
    assert_same_bits(torch.cat(parts), ops.linear(x, w))


ROWS_APART = """
import os
import torch
from ostinato import ops
if "MKL_CBWR" in os.environ:
    torch.backends.mkldnn.is_available = lambda: False
for dtype in (torch.float32, torch.bfloat16):
    for columns in (1, 2, 4, 33):
        for depth in (16, 100, 257, 1536):
            x, w = (torch.randn(n, depth).to(dtype) for n in (20, columns))
            bias = torch.randn(columns).to(dtype)
            for b in (None, bias):
                apart = torch.cat([ops.linear(row[None], w, bias=b) for row in x])
                assert torch.equal(apart, ops.linear(x, w, bias=b)), (columns, depth, b is None)
cache, table = torch.randn(10, 16, 3, 64), torch.arange(10, dtype=torch.int32)[None]
q, lens = torch.randn(150, 9, 64), torch.arange(1, 151, dtype=torch.int32)
options = {"cu_seqlens_q": torch.tensor([0, 150], dtype=torch.int32), "max_seqlen_q": 150}
whole = ops.paged_attention(q, cache, cache, table, lens[-1:], **options)
for n in (1, 2, 7, 8):
    some = torch.randperm(150)[:n]
    step = ops.paged_attention(q[some], cache, cache, table.expand(n, -1), lens[some])
    assert torch.equal(step, whole[some]), n
"""


@pytest.mark.parametrize(
    ("library", "instructions"),
    sampled(
        [
            ("MKL_CBWR", "COMPATIBLE"),
            ("MKL_CBWR", "SSE4_2"),
            ("MKL_CBWR", "AVX2"),
            ("MKL_CBWR", "AVX512"),
            ("ONEDNN_MAX_CPU_ISA", "SSE41"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
            ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),
        ],
        5,
    ),
)
def test_rows_apart_on_other_processors(library: str, instructions: str) -> None:
    """Let MKL, or oneDNN, do as on processors with these instructions; MKL without oneDNN."""
    environment = {**os.environ, library: instructions}
    subprocess.run([sys.executable, "-c", ROWS_APART], check=True, env=environment)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@invariance
@given(selection=selections(), columns=SIZES, depth=SIZES)
def test_w8a8_linear(
    dtype: torch.dtype,
    device: torch.device,
    selection: tuple[int, list[int]],
    columns: int,
    depth: int,
) -> None:
    rows, chosen = selection
    x, w = (quantized_randn((n, depth), dtype).to(device) for n in (rows, columns))
    x_scale, w_scale = (torch.rand(n).to(device) for n in (rows, columns))
    weight = ops.pack_weight(w)

    def product(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ops.w8a8_linear(x, weight, scale, w_scale, batch_invariant=True)

    check_rows(product, chosen, x, x_scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@invariance
@given(selection=selections(), columns=st.sampled_from([2, 6, 34, 130, 1000, 40000]))
def test_norms_gates_and_quantization(
    dtype: torch.dtype, device: torch.device, selection: tuple[int, list[int]], columns: int
) -> None:
    rows, chosen = selection
    x, residual = (torch.randn(rows, columns).to(dtype).to(device) for _ in range(2))
    weight = torch.randn(columns).to(dtype).to(device)
    scale = torch.tensor(0.02, device=device)
    check_rows(lambda x, r: ops.rms_norm(x, weight, 1e-6, residual=r), chosen, x, residual)
    check_rows(ops.silu_mul, chosen, x)
    for target in (torch.int8, E4M3):
        check_rows(lambda x, t=target: ops.quantize_per_token(x, t), chosen, x)
        check_rows(lambda x, t=target: ops.quantize_per_tensor(x, scale, t), chosen, x)
        check_rows(lambda x, t=target: ops.rms_norm_quantize(x, weight, 1e-6, t), chosen, x)
        check_rows(lambda x, t=target: ops.silu_mul_quantize(x, t), chosen, x)


@invariance
@given(selection=selections(), vocabulary=st.sampled_from([1, 7, 300, 5000]))
def test_sample(device: torch.device, selection: tuple[int, list[int]], vocabulary: int) -> None:
    rows, chosen = selection
    parameters = (
        torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(5)[:rows],
        torch.tensor([0, 5, 1000]).repeat(7)[:rows],
        torch.tensor([1.0, 0.9]).repeat(10)[:rows],
        torch.tensor([0.0, 0.01, 0.0]).repeat(7)[:rows],
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.arange(rows),
    )
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")
    check_rows(
        lambda logits, *columns: ops.sample(logits, **dict(zip(names, columns, strict=True))),
        chosen,
        *(x.to(device) for x in (torch.randn(rows, vocabulary) * 3, *parameters)),
    )


@invariance
@given(selection=selections(), norm=st.booleans(), rotary_dim=st.sampled_from([2, 10, 18]))
def test_append_kv(
    device: torch.device, selection: tuple[int, list[int]], norm: bool, rotary_dim: int
) -> None:
    rows, chosen = selection
    cos_sin = torch.randn(30, rotary_dim).to(device)
    weight = torch.randn(18).to(device) if norm else None

    def append(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        cache = torch.zeros(6, 4, 3, 18, device=device)
        v_cache, scale = cache.char(), torch.zeros(6, 4, 3, device=device)
        k_cache, k_scale = v_cache.clone(), scale.clone()
        q_out = ops.append_kv(
            k,
            v,
            k_cache,
            v_cache,
            torch.arange(k.size(0), device=device),
            positions=positions,
            cos_sin=cos_sin,
            q=q,
            q_norm_weight=weight,
            k_norm_weight=weight,
            k_scale=k_scale,
            v_scale=scale,
        )
        assert q_out is not None
        written = (x.flatten(0, 1)[: k.size(0)] for x in (k_cache, v_cache, k_scale, scale))
        return (q_out, *written)

    q, k, v = (torch.randn(rows, heads, 18).to(device) for heads in (6, 3, 3))
    check_rows(append, chosen, q, k, v, torch.randint(30, (rows,), dtype=torch.int32).to(device))


@st.composite
def attention_cases(draw: st.DrawFn) -> PagedCase:
    q_lens = draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    options: dict[str, Any] = draw(
        st.sampled_from([{}, {"window": (4, -1)}, {"softcap": 2.0}, {"sinks": True}])
    )
    return PagedCase(
        q_lens=tuple(q_lens),
        k_lens=tuple(q + draw(st.integers(0, 40)) for q in q_lens),
        heads_kv=draw(st.integers(1, 3)),
        heads_q=6,
        dim=draw(st.sampled_from([5, 16, 64])),
        value_dim=draw(st.sampled_from([None, 24])),
        page_size=draw(st.sampled_from([1, 4, 16])),
        dtype=draw(st.sampled_from(FLOATS)),
        cache_dtype=draw(st.sampled_from([None, torch.int8, E4M3])),
        **options,
    )


@invariance
@given(case=attention_cases(), lse=st.booleans(), extra=st.integers(0, 70))
def test_paged_attention_of_each_sequence_alone(
    device: torch.device, case: PagedCase, lse: bool, extra: int
) -> None:
    """Other sequences, their lengths, and the capacities of the call leave no trace."""
    (q, k_cache, v_cache, table, lens), options = case.build(device)
    options |= {"return_lse": lse, "batch_invariant": True}
    whole = ops.paged_attention(q, k_cache, v_cache, table, lens, **options)
    offsets = options.pop("cu_seqlens_q").tolist()
    for b, length in enumerate(case.q_lens or ()):
        rows = slice(offsets[b], offsets[b + 1])
        options["max_seqlen_q"] = length + extra
        alone = ops.paged_attention(
            q[rows],
            k_cache,
            v_cache,
            table[b : b + 1, : -(-case.k_lens[b] // case.page_size)],
            lens[b : b + 1],
            cu_seqlens_q=int32([0, length], device),
            **options,
        )
        for part, everything in zip(alone, whole, strict=True) if lse else [(alone, whole)]:
            assert_same_bits(part, everything[rows])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(200, 700),
    cuts=st.lists(st.integers(1, 699), max_size=4),
    heads=st.sampled_from([(3, 9), (1, 1), (2, 16)]),
    window=st.sampled_from([None, (100, 0)]),
    dim=st.sampled_from([64, 20]),
)
def test_a_long_prompt_in_chunks_and_token_by_token(
    length: int, cuts: list[int], heads: tuple[int, int], window: Any, dim: int
) -> None:
    """Beyond the first tiles of the CPU: chunks, and a decode step with others beside it."""
    heads_kv, heads_q = heads
    pages = -(-length // 16)
    k_cache, v_cache = (torch.randn(2 * pages, 16, heads_kv, dim) for _ in range(2))
    table = torch.randperm(2 * pages).view(2, pages).int()
    q = torch.randn(length, heads_q, dim)

    def attend(start: int, stop: int) -> torch.Tensor:
        lens = torch.tensor([stop], dtype=torch.int32)
        options = {"cu_seqlens_q": int32([0, stop - start], q.device), "max_seqlen_q": length}
        args = (q[start:stop], k_cache, v_cache, table[:1], lens)
        return ops.paged_attention(*args, window=window, **options)

    whole = attend(0, length)
    bounds = sorted({0, *(cut for cut in cuts if cut < length), length})
    parts = [attend(a, b) for a, b in pairwise(bounds)]
    assert_same_bits(torch.cat(parts), whole)
    for position in {0, 63, 64, 127, 128, length // 2, length - 1}:
        pair = torch.stack([q[position], torch.randn(heads_q, dim)])
        lens = torch.tensor([position + 1, length // 3], dtype=torch.int32)
        step = ops.paged_attention(pair, k_cache, v_cache, table, lens, window=window)
        assert_same_bits(step[0], whole[position])


@invariance
@given(case=attention_cases(), lse=st.booleans())
def test_a_query_does_not_notice_how_its_sequence_is_chunked(
    device: torch.device, case: PagedCase, lse: bool
) -> None:
    """On CUDA any cut will do only because the kernels' first tile has all keys of these."""
    (q, k_cache, v_cache, table, lens), options = case.build(device)
    options |= {"return_lse": lse, "batch_invariant": True}
    whole = ops.paged_attention(q, k_cache, v_cache, table, lens, **options)
    options |= {"cu_seqlens_q": int32([0, 1], device), "max_seqlen_q": 1}
    row = 0
    for b, (q_len, k_len) in enumerate(zip(case.q_lens or (), case.k_lens, strict=True)):
        for length in range(k_len - q_len + 1, k_len + 1):
            args = (q[row : row + 1], k_cache, v_cache, table[b : b + 1], int32([length], device))
            one = ops.paged_attention(*args, **options)
            for part, everything in zip(one, whole, strict=True) if lse else [(one, whole)]:
                assert_same_bits(part[0], everything[row])
            row += 1
