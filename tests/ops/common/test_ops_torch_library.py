"""The ops as torch sees them: schemas, fakes, tracing, streams and capture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from ops_cases import E4M3, PagedCase, assert_same_bits, int32

from ostinato import ops

pytestmark = pytest.mark.usefixtures("kernels")


def attention_arguments(device: torch.device, draw: int) -> list[Any]:
    case = PagedCase(k_lens=(9, 9), q_lens=(3, 3), page_size=4, cache_dtype=torch.int8)
    (q, k_cache, v_cache, _, _), options = case.build(device)
    table = int32([(3, 1, 4, 0, 5, 2), (4, 2, 0, 5, 1, 3)][draw], device).view(2, 3)
    lens, cu_seqlens_q = ([(3, 9), (12, 5)][draw], [(0, 1, 3), (0, 3, 5)][draw])
    rule = (0.25, True, 5, -1, 2.0, torch.randn(4).to(device))
    return [
        q,
        k_cache,
        v_cache,
        table,
        int32(lens, device),
        int32(cu_seqlens_q, device),
        3,
        None,
        *rule,
        options["k_scale"],
        options["v_scale"],
        False,
        False,
        torch.zeros(6, 4, 16, device=device),
        torch.zeros(6, 4, device=device),
        None,
        ops.L2Partition([0, 1], 3, 1).words,
    ]


def varlen_arguments(device: torch.device, draw: int) -> list[Any]:
    def cu_seqlens(lengths: tuple[int, int]) -> torch.Tensor:
        return int32([0, lengths[0], sum(lengths)], device)

    q, k, v = (torch.randn(6, heads, 8).to(device) for heads in (4, 2, 2))
    k, v = ((x * 20).to(torch.int8) for x in (k, v))
    scales = [torch.rand(*shape).to(device) for shape in ((2,), (6, 2), (6, 2))]
    cu_q, cu_k = cu_seqlens([(1, 2), (3, 3)][draw]), cu_seqlens([(4, 2), (3, 3)][draw])
    rule = (0.3, True, -1, -1, 0.0, torch.randn(4).to(device))
    outputs = [torch.zeros(6, 4, 8, device=device), torch.zeros(6, 4, device=device)]
    return [q, k, v, cu_q, cu_k, 4, 4, *rule, *scales, False, *outputs, None]


def append_arguments(device: torch.device, draw: int) -> list[Any]:
    q, k, v = (torch.randn(3, heads, 8).to(device) for heads in (4, 2, 2))
    caches = [torch.zeros(2, 4, 2, 8, device=device, dtype=torch.int8) for _ in range(2)]
    # Of keys by token, of values fixed and written besides.
    written = [torch.zeros(2, 4, 2, device=device) for _ in range(2)]
    scales = (written[0], torch.rand(2).to(device) + 0.01, None, written[1])
    slots = torch.tensor([(5, -1, 0), (-1, 7, 2)][draw], device=device)
    positions = int32([(0, 3, 2), (1, 1, 0)][draw], device)
    cos_sin, *weights = (torch.randn(shape).to(device) for shape in ((4, 6), (8,), (8,)))
    norms = (False, *weights, 1e-6, True)
    return [k, v, *caches, slots, positions, cos_sin, q, q.clone() * 0, *norms, *scales, False]


def embed_arguments(device: torch.device, draw: int) -> list[Any]:
    columns = [(3, 0, 6, 3), (1, 5, 0, 2)], [(2, 1, 0, 2), (1, 0, 3, 3)]
    tokens, rows = (torch.tensor(draws[draw], device=device) for draws in columns)
    seen = torch.rand(4, 7).lt(0.2).to(device)
    # Of ids 1 to 5 of the 7 that there are.
    held = (torch.randn(5, 16).to(device), seen, rows, 1, 7)
    return [tokens, *held, None, False, torch.zeros(4, 16, device=device)]


def sample_arguments(device: torch.device, draw: int) -> list[Any]:
    batch, vocabulary = 12, 32000
    seed = torch.arange(batch) + 100 * draw
    columns = (
        torch.rand(batch) + 0.5,
        torch.randint(2, 200, (batch,)),
        torch.rand(batch) / 2 + 0.4,
        torch.rand(batch) / 4,
        seed * 2**33,
        seed + 7,
        torch.rand(batch) + 1,
        torch.rand(batch + 1, vocabulary) < 0.5,
        torch.arange(batch) + draw,
    )
    logits = torch.randn(batch, vocabulary).to(device)
    out = torch.zeros(batch, dtype=torch.int64, device=device)
    return [logits, *(column.to(device) for column in columns), None, out]


def process_logits_arguments(device: torch.device, draw: int) -> list[Any]:
    batch, slots, vocabulary = 3, 4, 70
    generator = torch.Generator().manual_seed(draw)

    def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=dtype)

    int32 = torch.int32
    columns = (
        torch.tensor([(2, 0, 3), (1, 3, 2)][draw]),
        torch.tensor([(2, 3, 4), (5, 2, 3)][draw]),
        integers(vocabulary, batch),
        torch.rand(batch, generator=generator) + 1.5,
        torch.rand(slots, vocabulary, generator=generator) < 0.5,
        torch.rand(slots, generator=generator) + draw,
        torch.rand(slots, generator=generator) + draw,
        torch.full((slots,), 1 + draw, dtype=int32),
        torch.tensor([(0, 1, 2), (3, 4, 5)][draw], dtype=int32).expand(slots, 3).contiguous(),
        torch.rand(slots, 3, generator=generator) + 1,
        torch.full((slots, 3), 3 + 2 * draw),
        torch.tensor([(1, 1, 0, 0), (1, 0, 1, 1)][draw], dtype=int32),
        integers(2**31 - 1, slots, 3, dtype=int32),
        integers(vocabulary, slots, 6, dtype=int32),
    )
    logits = torch.randn(batch, vocabulary).to(device)
    out = torch.zeros(batch, vocabulary, device=device)
    return [logits, *(column.to(device) for column in columns), out]


def token_logprobs_arguments(device: torch.device, draw: int) -> list[Any]:
    tokens = torch.tensor([(3, 0, 6), (1, 5, 2)][draw], device=device)
    wanted = int32([(2, -1, 3, 0), (1, 2, 0, 3)][draw], device)
    slots = torch.tensor([(0, 2, 1), (3, 1, 0)][draw], device=device)
    ids = torch.zeros(3, 4, dtype=torch.int32, device=device)
    return [torch.randn(3, 7).to(device), tokens, wanted, slots, torch.zeros(3, 5).to(device), ids]


def op_arguments(name: str, device: torch.device, draw: int = 0) -> list[Any]:
    """Return arguments of an op; draws 0 and 1 differ in every value, and in nothing else."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def asymmetric_outputs(k: int) -> tuple[torch.Tensor, ...]:
        return empty(3, k, dtype=torch.int8), empty(3), empty(3, dtype=torch.int32)

    x, w, w_bias = randn(3, 16), randn(16), randn(16)
    x8, w8 = (torch.randint(-9, 9, (n, 16), dtype=torch.int8).to(device) for n in (3, 8))
    x_scale, w_scale, bias = (torch.rand(n).to(device) for n in (3, 8, 8))
    scale = torch.tensor([0.1, 0.07][draw], device=device)
    zero = torch.tensor([3, -5][draw], dtype=torch.int32, device=device)
    w_sum = w8.sum(1, dtype=torch.int32)
    int8 = torch.int8
    return {
        "activation": lambda: [x, "gelu_mul", empty(3, 8)],
        "activation_quantize": lambda: [
            *(x, "relu2", None, None, False, empty(3, 16, dtype=int8), empty(3), None)
        ],
        "activation_quantize_asymmetric": lambda: [x, "gelu", *asymmetric_outputs(16), None],
        "activation_quantize_asymmetric_discarding": lambda: [
            *(x, "silu_mul", *asymmetric_outputs(8), None)
        ],
        "activation_quantize_discarding": lambda: [
            *(x, "silu_mul", scale, zero, False, empty(3, 8, dtype=int8), empty(3), None)
        ],
        "activation_quantize_per_group": lambda: [
            *(x, "gelu_tanh", False, empty(3, 16, dtype=E4M3), empty(1, 3), None)
        ],
        "activation_quantize_per_group_discarding": lambda: [
            *(x, "silu_mul", False, empty(3, 8, dtype=E4M3), empty(1, 3), None)
        ],
        "append_kv": lambda: append_arguments(device, draw),
        "dynamic_w8a8_linear": lambda: [x, w8, w_scale, bias, None, False, empty(3, 8)],
        "embed": lambda: embed_arguments(device, draw),
        "fp8_block_linear": lambda: [
            *(x8.to(E4M3), w8.to(E4M3), x_scale[None], w_scale[None, :1]),
            *(bias, None, True, empty(3, 8)),
        ],
        "layer_norm": lambda: [x, w, w_bias, 1e-6, randn(3, 16), empty(3, 16), empty(3, 16)],
        "layer_norm_quantize": lambda: [
            *(x, w, w_bias, 1e-6, randn(3, 16), scale, zero, False),
            *(empty(3, 16, dtype=int8), empty(3), empty(3, 16), None),
        ],
        "layer_norm_quantize_asymmetric": lambda: [
            *(x, w, w_bias, 1e-6, randn(3, 16), *asymmetric_outputs(16), empty(3, 16), None)
        ],
        "layer_norm_quantize_per_group": lambda: [
            *(x, w, w_bias, 1e-6, randn(3, 16), False),
            *(empty(3, 16, dtype=E4M3), empty(1, 3), empty(3, 16), None),
        ],
        "linear": lambda: [x, randn(5, 16), randn(5), None, empty(3, 5)],
        "merge_states": lambda: [
            *(randn(3, 2, 16), randn(3, 2), randn(3, 2, 16), randn(3, 2)),
            *(empty(3, 2, 16), empty(3, 2)),
        ],
        "paged_attention": lambda: attention_arguments(device, draw),
        "process_logits": lambda: process_logits_arguments(device, draw),
        "quantize_asymmetric": lambda: [x, *asymmetric_outputs(16), None],
        "quantize_per_group": lambda: [x, False, empty(3, 16, dtype=E4M3), empty(1, 3), None],
        "quantize_per_tensor": lambda: [
            *(x, scale, zero, False, empty(3, 16, dtype=int8), None, empty(3))
        ],
        "quantize_per_token": lambda: [x, empty(3, 16, dtype=int8), empty(3), None],
        "rms_norm": lambda: [x, w, 1e-6, randn(3, 16), empty(3, 16), empty(3, 16)],
        "rms_norm_quantize": lambda: [
            *(x, w, 1e-6, randn(3, 16), scale, zero, False),
            *(empty(3, 16, dtype=int8), empty(3), empty(3, 16), None),
        ],
        "rms_norm_quantize_asymmetric": lambda: [
            *(x, w, 1e-6, randn(3, 16), *asymmetric_outputs(16), empty(3, 16), None)
        ],
        "rms_norm_quantize_per_group": lambda: [
            *(x, w, 1e-6, randn(3, 16), False),
            *(empty(3, 16, dtype=E4M3), empty(1, 3), empty(3, 16), None),
        ],
        "rms_norm_w8a8_linear": lambda: [
            *(x, w, 1e-6, randn(3, 16), w8, w_scale, bias, None, False),
            *(empty(3, 8), empty(3, 16)),
        ],
        "rms_norm_w8a8_mlp": lambda: [
            *(x, w, 1e-6, randn(3, 16), w8, w_scale, bias, w8[:, :4].clone(), randn(8), randn(8)),
            *(4, "gelu_mul", None, False, empty(3, 8), empty(3, 16)),
        ],
        "sample": lambda: sample_arguments(device, draw),
        "softcap": lambda: [
            *(x, 2.5, torch.tensor([(0.0, 0.7, 0.0), (0.0, 0.0, 0.9)][draw], device=device)),
            *(torch.tensor([(1.0, 1.0, 1.5), (1.2, 1.0, 1.0)][draw], device=device), None),
        ],
        "token_logprobs": lambda: token_logprobs_arguments(device, draw),
        "varlen_attention": lambda: varlen_arguments(device, draw),
        "w8a8_linear": lambda: [
            *(x8, w8, x_scale, w_scale, bias, zero, w_sum, None, True, False, False, empty(3, 8))
        ],
    }[name]()


# Some kernels hand over the best of logits: test_ops_lm_head.py has those ops. And those of a
# mixture of experts take a plan: test_ops_moe_torch_library.py. Those over ranks take the name of a
# communicator: test_ops_all_reduce_norm.py.
OPS = [
    name
    for name in ops.__all__
    if name.islower()
    and not name.endswith("_workspace")  # a number, from capacities
    and name not in ("channel_scales", "pack_experts", "pack_weight")
    and not name.startswith(("all_", "moe_"))
    and name not in ("linear_logits", "rms_norm_w8a8_logits")
    and not name.startswith("silu_mul")  # a kind of activation
] + [f"activation_quantize{form}_discarding" for form in ("", "_asymmetric", "_per_group")]


def overload_of(name: str) -> Any:
    return getattr(torch.ops.ostinato, name).default


def is_written(name: str) -> list[bool]:
    return [argument.alias_info is not None for argument in overload_of(name)._schema.arguments]


def results(name: str, arguments: list[Any]) -> list[torch.Tensor]:
    """Return what the op writes, given copies of `arguments`."""
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    overload_of(name)(*copies)
    written = zip(copies, is_written(name), strict=True)
    return [x for x, output in written if output and isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", OPS)
def test_every_argument_matters_in_the_draws(name: str, device: torch.device) -> None:
    """What a replay with the second draw shows is that no tensor was frozen by the first."""
    first, second = (op_arguments(name, device, draw) for draw in (0, 1))
    expected = results(name, second)
    for at, output in enumerate(is_written(name)):
        if isinstance(second[at], torch.Tensor) and not output:
            frozen = [*second[:at], first[at], *second[at + 1 :]]
            pairs = zip(results(name, frozen), expected, strict=True)
            assert not all(torch.equal(got, want) for got, want in pairs), f"argument {at}"
        elif not isinstance(second[at], torch.Tensor):
            assert first[at] == second[at]


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str, device: torch.device) -> None:
    arguments = tuple(op_arguments(name, device))
    how = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(x, torch.Tensor) and x.dtype is E4M3 for x in arguments):
        how.append("test_schema")  # which compares with torch.allclose: torch lacks it for FP8
    torch.library.opcheck(overload_of(name), arguments, test_utils=how)


def test_parameters_are_taken_without_gradients(device: torch.device) -> None:
    x = torch.randn(2, 8, device=device, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(8, 8, device=device))
    normed, total = ops.rms_norm(x, w[0], 1e-6, residual=x)
    for result in (ops.linear(x, w), ops.silu_mul(x), normed, total):
        assert not result.requires_grad


@pytest.mark.parametrize("name", OPS)
def test_autocast_changes_no_bit(name: str, device: torch.device) -> None:
    arguments = op_arguments(name, device)
    expected = results(name, arguments)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = results(name, arguments)
    for result, without in zip(found, expected, strict=True):
        assert_same_bits(result, without)


def layer(
    q: torch.Tensor,
    k: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    w: torch.Tensor,
    *,
    check_bounds: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the work of a layer of prefill, by paged attention and by that to packed keys."""
    q = ops.append_kv(k, k, k_cache, v_cache, slots, q=q, check_bounds=check_bounds)
    out = ops.paged_attention(
        q,
        k_cache,
        v_cache,
        table,
        lens,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_q=3,
        check_bounds=check_bounds,
    ).flatten(1)
    packed = ops.varlen_attention(
        q, k, k, cu_seqlens, cu_seqlens, 3, 3, check_bounds=check_bounds
    ).flatten(1)
    normed, total = ops.rms_norm(out, w[0], 1e-6, residual=packed)
    return ops.silu_mul(ops.linear(normed + total, w)), total


def layer_arguments(device: torch.device) -> tuple[torch.Tensor, ...]:
    q, k = (torch.randn(5, heads, 16).to(device) for heads in (4, 2))
    k_cache, v_cache = (torch.zeros(6, 4, 2, 16, device=device) for _ in range(2))
    slots = torch.tensor([0, 1, 2, 21, -1], device=device)
    table, lens = int32([0, 5], device).view(2, 1), int32([3, 2], device)
    w = torch.randn(8, 64).to(device)
    return (q, k, k_cache, v_cache, slots, int32([0, 3, 5], device), table, lens, w)


def check_traced(traced: Callable[..., Any], device: torch.device) -> None:
    """Demand of a traced `layer` the results of the original, the caches' contents included."""
    arguments = layer_arguments(device)
    copies = [x.clone() for x in arguments]
    expected = layer(*copies)
    assert copies[2][5, 1].all()
    for got, want in zip(traced(*arguments), expected, strict=True):
        assert_same_bits(got, want)
    for got, want in zip(arguments, copies, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("check_bounds", [False, True])
def test_a_layer_traces_into_one_graph(check_bounds: bool, device: torch.device) -> None:
    step = functools.partial(layer, check_bounds=check_bounds)
    check_traced(torch.compile(step, fullgraph=True, backend="aot_eager"), device)


def test_a_layer_exports(device: torch.device) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return layer(*arguments)

    program = torch.export.export(Layer(), layer_arguments(device))
    check_traced(program.module(), device)


def test_a_number_of_a_module_traces_with_dynamic_shapes(device: torch.device) -> None:
    class Norm(torch.nn.Module):
        eps = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ops.rms_norm(x, x[0], self.eps)

    norm = Norm()
    traced = torch.compile(norm, fullgraph=True, backend="aot_eager", dynamic=True)
    for norm.eps in (1e-6, 1.0):
        x = torch.randn(3, 16, device=device)
        assert_same_bits(traced(x), norm(x))


def attend_to_pages(
    q: torch.Tensor, cache: torch.Tensor, cu_seqlens: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    options = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": q.size(0)}
    return ops.paged_attention(q, cache, cache, table, cu_seqlens[1:], **options)


def attend_to_packed(
    q: torch.Tensor, cache: torch.Tensor, cu_seqlens: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    k = cache.flatten(0, 1)[: q.size(0)]
    return ops.varlen_attention(q, k, k, cu_seqlens, cu_seqlens, 128, 128)


@pytest.mark.parametrize("attend", [attend_to_pages, attend_to_packed])
def test_attention_is_traced_once_for_all_lengths(
    attend: Callable[..., torch.Tensor], device: torch.device
) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    traced = torch.compile(attend, fullgraph=True, backend=counter, dynamic=True)
    cache, table = torch.randn(4, 8, 2, 16).to(device), int32([2, 0, 3, 1], device).view(1, 4)
    for tokens in range(5, 30, 6):  # no other size: torch would take equal ones for one
        arguments = (torch.randn(tokens, 4, 16).to(device), cache, int32([0, tokens], device))
        assert_same_bits(traced(*arguments, table), attend(*arguments, table))
    assert counter.frame_count == 1


def test_products_of_packed_weights_trace_too(device: torch.device) -> None:
    x, w, x_scale, w_scale, *_ = op_arguments("w8a8_linear", device)
    weight = ops.pack_weight(w)
    torch.library.opcheck(
        overload_of("w8a8_linear"),
        (x, weight.data, x_scale, w_scale, *[None] * 4, True, True, False, x_scale.new_empty(3, 8)),
    )

    def run(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        return ops.w8a8_linear(x, weight, x_scale, w_scale)

    traced = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_bits(traced(x, x_scale), run(x, x_scale))


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
@pytest.mark.parametrize("name", OPS)
def test_a_captured_op_replays_on_new_values(name: str) -> None:
    device = torch.device("cuda")
    op, arguments = overload_of(name), op_arguments(name, device)
    graph = replayed(lambda: op(*arguments))
    fresh = op_arguments(name, device, draw=1)
    expected = results(name, fresh)
    for value, new in zip(arguments, fresh, strict=True):
        if isinstance(value, torch.Tensor):
            value.copy_(new)
    graph.replay()
    written = [
        value
        for value, output in zip(arguments, is_written(name), strict=True)
        if output and isinstance(value, torch.Tensor)
    ]
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
