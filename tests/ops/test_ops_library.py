"""The ops as torch sees them: schemas, fakes, tracing, streams and capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_cases import E4M3, PagedCase, assert_same_bits, int32

from ostinato import ops


def attention_arguments(device: torch.device) -> list[Any]:
    (q, *rest), options = PagedCase(k_lens=(3, 9), page_size=4, sinks=True).build(device)
    rule = (0.25, True, 5, -1, 2.0, options["sinks"], None, None)
    lse = torch.empty(2, 4, device=device)
    return [
        q,
        *rest,
        None,
        1,
        *rule,
        torch.empty_like(q, memory_format=torch.contiguous_format),
        lse,
    ]


def append_arguments(device: torch.device) -> list[Any]:
    q, k, v = (torch.randn(3, heads, 8, device=device) for heads in (4, 2, 2))
    caches = [torch.zeros(2, 4, 2, 8, device=device, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(2, 4, 2, device=device) for _ in range(2)]
    slots = torch.tensor([5, -1, 0], device=device)
    rotary = (int32([0, 3, 2], device), torch.randn(4, 6, device=device))
    weights = [torch.ones(8, device=device) for _ in range(2)]
    return [k, v, *caches, slots, *rotary, q, torch.empty_like(q), False, *weights, 1e-6, *scales]


def op_arguments(name: str, device: torch.device) -> list[Any]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    x, w = randn(3, 16), randn(16)
    x8, w8 = (torch.randint(-9, 9, (n, 16), dtype=torch.int8, device=device) for n in (3, 8))
    scale = torch.tensor(0.1, device=device)
    zero = torch.tensor(3, dtype=torch.int32, device=device)
    int8 = torch.int8
    cu = int32([0, 1, 3], device)
    q, k = randn(3, 4, 8), randn(3, 2, 8)
    one, ids = torch.ones(3, device=device), torch.arange(3, device=device)
    rule = (0.3, True, -1, -1, 0.0, None, None, None)
    return {
        "append_kv": lambda: append_arguments(device),
        "linear": lambda: [x, randn(5, 16), randn(5), empty(3, 5)],
        "paged_attention": lambda: attention_arguments(device),
        "quantize_per_tensor": lambda: [x, scale, zero, empty(3, 16, dtype=int8)],
        "quantize_per_token": lambda: [x, empty(3, 16, dtype=int8), empty(3)],
        "rms_norm": lambda: [x, w, 1e-6, randn(3, 16), empty(3, 16), empty(3, 16)],
        "rms_norm_quantize": lambda: [
            *(x, w, 1e-6, randn(3, 16), None, None),
            *(empty(3, 16, dtype=int8), empty(3), empty(3, 16)),
        ],
        "sample": lambda: [
            *(x, one, ids, one, one * 0, ids, ids, one, x > 0),
            empty(3, dtype=torch.int64),
        ],
        "silu_mul": lambda: [x, empty(3, 8)],
        "silu_mul_quantize": lambda: [x, scale, zero, empty(3, 8, dtype=int8), None],
        "varlen_attention": lambda: [q, k, k.clone(), cu, cu, 2, 2, *rule, empty(3, 4, 8), None],
        "w8a8_linear": lambda: [x8, w8, one, scale, None, zero, None, empty(3, 8)],
    }[name]()


@pytest.mark.parametrize("name", ops.__all__)
def test_opcheck(name: str, device: torch.device) -> None:
    op = getattr(torch.ops.ostinato, name).default
    torch.library.opcheck(op, tuple(op_arguments(name, device)))


def test_parameters_are_taken_without_gradients(device: torch.device) -> None:
    x = torch.randn(2, 8, device=device, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(8, 8, device=device))
    normed, total = ops.rms_norm(x, w[0], 1e-6, residual=x)
    for result in (ops.linear(x, w), ops.silu_mul(x), normed, total):
        assert not result.requires_grad


def test_a_decode_layer_traces_into_one_graph(device: torch.device) -> None:
    (q, k_cache, v_cache, table, lens), _ = PagedCase(page_size=4).build(device)
    k = torch.randn(4, 2, 16, device=device)
    slots = torch.full((4,), -1, device=device)
    w = torch.randn(8, 64, device=device)

    def layer(q: torch.Tensor) -> torch.Tensor:
        q = ops.append_kv(k, k, k_cache, v_cache, slots, q=q)
        out = ops.paged_attention(q, k_cache, v_cache, table, lens).flatten(1)
        normed, total = ops.rms_norm(out, w[0], 1e-6, residual=out)
        return ops.silu_mul(ops.linear(normed + total, w))

    expected = layer(q)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(q), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("by_handle", [False, True])
def test_stream_orders_the_work(by_handle: bool) -> None:
    device = torch.device("cuda")
    stream = torch.cuda.Stream()
    x = torch.zeros(4, 8, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
    # Had the op been launched on the current stream, it would have read zeros.
    y = ops.silu_mul(x, stream=stream.cuda_stream if by_handle else stream)
    stream.synchronize()
    assert (y > 0).all()


@pytest.mark.gpu
def test_bad_streams() -> None:
    x = torch.zeros(2, 4, device="cuda")
    for bad in ("0", 1.5, True):
        with pytest.raises(TypeError, match=r"stream: got .*, expected a torch\.cuda\.Stream"):
            ops.silu_mul(x, stream=bad)  # type: ignore[arg-type]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert ops.silu_mul(x, stream=0).shape == (2, 2)


def replayed(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Return a graph of `step`, warmed up and captured on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("name", ops.__all__)
def test_a_captured_op_replays_on_new_values(name: str) -> None:
    device = torch.device("cuda")
    op = getattr(torch.ops.ostinato, name).default
    arguments = op_arguments(name, device)
    schema = op._schema.arguments
    written = [
        value
        for value, argument in zip(arguments, schema, strict=True)
        if isinstance(value, torch.Tensor) and argument.alias_info is not None
    ]
    graph = replayed(lambda: op(*arguments))
    for value, fresh in zip(arguments, op_arguments(name, device), strict=True):
        if isinstance(value, torch.Tensor) and value.dtype is not torch.bool:
            value.copy_(fresh)
    initial = [value.clone() for value in written]
    op(*arguments)
    expected = [value.clone() for value in written]
    for value, before in zip(written, initial, strict=True):
        value.copy_(before)
    graph.replay()
    for value, eager in zip(written, expected, strict=True):
        assert_same_bits(value, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, E4M3], ids=str)
def test_one_graph_serves_many_lengths(cache_dtype: torch.dtype | None) -> None:
    device = torch.device("cuda")
    case = PagedCase(k_lens=(40, 40, 40), page_size=8, cache_dtype=cache_dtype)
    (q, k_cache, v_cache, table, lens), options = case.build(device)
    out = torch.empty(3, 4, 16, device=device)
    args = (q, k_cache, v_cache, table, lens)
    graph = replayed(lambda: ops.paged_attention(*args, **options, out=out))
    for lengths in ([1, 2, 3], [0, 40, 17], [39, 8, 0], [40, 40, 40]):
        lens.copy_(int32(lengths, device))
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, ops.paged_attention(*args, **options))
        assert_same_bits(
            out,
            torch.cat(
                [
                    ops.paged_attention(
                        q[b : b + 1], k_cache, v_cache, table[b : b + 1], lens[b : b + 1], **options
                    )
                    for b in range(3)
                ]
            ),
        )
