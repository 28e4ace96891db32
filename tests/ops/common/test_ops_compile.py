"""Every public op inside a function that torch.compile has compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import isfunction
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from ops_cases import E4M3, assert_same_bits, int32

from effort import effort
from ostinato import ops
from ostinato.jit import targets
from ostinato.ops.collective.communicator import Communicator, local_communicators
from ostinato.ops.collective.peers import local_peers
from ostinato.ops.common.device import runs
from ostinato.ops.linear import w8a8_gemm
from ostinato.ops.linear.gemm_variants import GemmTiled
from ostinato.ops.linear.tile_table import H200_SMS
from ostinato.ops.moe.plan import MoePlan

pytestmark = pytest.mark.usefixtures("kernels")

Tensors = dict[str, torch.Tensor]

# Called when a model is loaded, not in a step: they re-lay weights and scales, or return a number.
OUTSIDE = {
    *("pack_weight", "pack_experts", "channel_scales"),
    *("paged_attention_workspace", "varlen_attention_workspace"),
}
OPS = [name for name in ops.__all__ if isfunction(getattr(ops, name)) and name not in OUTSIDE]
M, K, N, VOCABULARY = 3, 256, 128, 96
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
RANKS: dict[str, Communicator] = {}  # of each kind of device: that of the only rank
EXPERTS = 8


def inputs(device: torch.device, draw: int) -> Tensors:
    """Return tensors for all of `CALLS`; those of another draw differ in nothing but values."""
    generator = torch.Generator().manual_seed(draw)
    if device.type not in RANKS:
        RANKS[device.type] = (
            local_communicators(1)[0] if device.type == "cpu" else local_peers(1, device)[0]
        )

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def rand(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(device)

    def integers(least: int, end: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(least, end, shape, generator=generator).to(device, dtype)

    int8, i32, i64 = torch.int8, torch.int32, torch.int64
    lengths = [(5, 20), (17, 32)][draw]
    return {
        "x": randn(M, K),
        "gated": randn(M, 2 * K),
        "residual": randn(M, K),
        "norm": randn(K),
        "norm_bias": randn(K),
        "w16": randn(N, K),
        "head": randn(VOCABULARY, K),
        "x8": integers(-99, 99, M, K, dtype=int8),
        "w8": integers(-99, 99, N, K, dtype=int8),
        "head8": integers(-99, 99, VOCABULARY, K, dtype=int8),
        "x_scale": rand(M),
        "w_scale": rand(N),
        "head_scale": rand(VOCABULARY),
        "group_scale": rand(2, M),
        "block_scale": rand(2, N // 8),
        "bias": randn(N),
        "scale": rand(1)[0],
        "zero": integers(-9, 9, 1, dtype=i32)[0],
        "q": randn(2, HEADS, DIM),
        "k": randn(2, KV_HEADS, DIM),
        "v": randn(2, KV_HEADS, DIM),
        "k_cache": randn(6, PAGE, KV_HEADS, DIM),
        "v_cache": randn(6, PAGE, KV_HEADS, DIM),
        "page_table": int32([(3, 1, 4, 0), (0, 5, 2, 3)][draw], device).view(2, 2),
        "seq_lens": int32(lengths, device),
        "slots": torch.tensor([(7, -1), (90, 3)][draw], device=device),
        "cu_seqlens": int32([(0, 1, 2), (0, 0, 2)][draw], device),
        "o_a": randn(M, HEADS, DIM),
        "o_b": randn(M, HEADS, DIM),
        "lse_a": rand(M, HEADS),
        "lse_b": rand(M, HEADS),
        "tokens": integers(0, VOCABULARY, M, dtype=i64),
        "table": randn(VOCABULARY, K),
        "routing": randn(M, EXPERTS, dtype=torch.float32),
        "experts": randn(EXPERTS, N, K),
        "of_slots": randn(M, 2, K),
        "logits": randn(M, VOCABULARY, dtype=torch.float32),
        "temperature": rand(M) * (1 - draw),
        "penalty": rand(M),
        "top_p": rand(M) / 2,
        "top_k": integers(2, 9, M, dtype=i64),
        "min_p": rand(M) / 9,
        "seeds": integers(0, 99, M, dtype=i64),
        "counters": integers(1, 5, M, dtype=i64),
        "seen": integers(0, 2, M, VOCABULARY, dtype=torch.bool),
        "wanted": integers(0, 4, M, dtype=i32),
        "places": torch.tensor([(0, 2, 1), (2, 1, 0)][draw], device=device),
        "frequency": rand(M),
        "presence": rand(M),
        "history": integers(0, VOCABULARY, M, 8, dtype=i32),
        "edits": integers(0, 3, M, dtype=i32),
        "edit_values": rand(M, 2),
        "edit_ids": torch.tensor([[1, 2], [3, 4], [5, 6]]).to(device, i32) + draw,
        "edit_ends": integers(1, 9, M, 2, dtype=i64),
        "masked": integers(0, 2, M, dtype=i32),
        "mask": integers(0, 2**31, M, 3, dtype=i32),
    }


def sampling(t: Tensors) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")
    return {name: t[name] for name in names}


def tables(t: Tensors) -> ops.LogitsTables:
    names = ("frequency", "presence", "history", "edits", "edit_ids", "edit_values", "edit_ends")
    return ops.LogitsTables(*(t[name] for name in names), t["masked"], t["mask"])


def cache(t: Tensors) -> tuple[torch.Tensor, ...]:
    return t["k_cache"], t["v_cache"], t["page_table"], t["seq_lens"]


INT8 = torch.int8
# What `append_kv`, `process_logits` and `softcap` write besides their results, or in place.
WRITTEN = ("k_cache", "v_cache", "history", "logits")


def e4m3(t: torch.Tensor) -> torch.Tensor:
    """Return small integers in FP8: Triton turns no integers into it directly."""
    return t.float().to(E4M3)


def plan(t: Tensors) -> MoePlan:
    return ops.moe_route(t["routing"], 2, renormalize=True)


def norm(t: Tensors) -> tuple[Any, ...]:
    return t["x"], t["norm"], 1e-6


def summed(t: Tensors) -> tuple[Any, ...]:
    return t["x"], RANKS[t["x"].device.type], t["norm"], 1e-6


# A call of each op, by its name.
CALLS: dict[str, Callable[[Tensors], Any]] = {
    "activation": lambda t: ops.activation(t["gated"], "gelu_mul"),
    "activation_quantize": lambda t: ops.activation_quantize(t["x"], "relu2", INT8),
    "activation_quantize_asymmetric": lambda t: ops.activation_quantize_asymmetric(
        t["gated"], "silu_mul"
    ),
    "activation_quantize_per_group": lambda t: ops.activation_quantize_per_group(t["x"], "gelu"),
    "all_gather": lambda t: ops.all_gather(*summed(t)[:2]),
    "all_reduce": lambda t: ops.all_reduce(*summed(t)[:2]),
    "all_reduce_norm": lambda t: ops.all_reduce_norm(*summed(t), residual=t["residual"]),
    "all_reduce_norm_quantize": lambda t: ops.all_reduce_norm_quantize(*summed(t), INT8),
    "all_reduce_norm_quantize_per_group": lambda t: ops.all_reduce_norm_quantize_per_group(
        *summed(t), residual=t["residual"]
    ),
    "append_kv": lambda t: ops.append_kv(t["k"], t["v"], t["k_cache"], t["v_cache"], t["slots"]),
    "dynamic_w8a8_linear": lambda t: ops.dynamic_w8a8_linear(
        t["x"], t["w8"], t["w_scale"], bias=t["bias"], batch_invariant=True
    ),
    "embed": lambda t: ops.embed(t["tokens"], t["table"]),
    "fp8_block_linear": lambda t: ops.fp8_block_linear(
        *(e4m3(t["x8"]), e4m3(t["w8"]), t["group_scale"], t["block_scale"]),
        batch_invariant=True,
    ),
    "layer_norm": lambda t: ops.layer_norm(*norm(t), bias=t["norm_bias"], residual=t["residual"]),
    "layer_norm_quantize": lambda t: ops.layer_norm_quantize(*norm(t), INT8, bias=t["norm_bias"]),
    "layer_norm_quantize_asymmetric": lambda t: ops.layer_norm_quantize_asymmetric(*norm(t)),
    "layer_norm_quantize_per_group": lambda t: ops.layer_norm_quantize_per_group(*norm(t)),
    "linear": lambda t: ops.linear(t["x"], t["w16"], bias=t["bias"]),
    "linear_logits": lambda t: ops.linear_logits(
        t["x"], t["head"], temperature=t["temperature"], repetition_penalty=t["penalty"]
    ),
    "merge_states": lambda t: ops.merge_states(t["o_a"], t["lse_a"], t["o_b"], t["lse_b"]),
    "moe_combine": lambda t: ops.moe_combine(
        t["of_slots"], plan(t), residual=t["residual"], norm_weight=t["norm"], quantize=INT8
    ),
    "moe_linear": lambda t: ops.moe_linear(t["x"], t["experts"], plan(t), to="experts"),
    "moe_route": plan,
    "paged_attention": lambda t: ops.paged_attention(t["q"], *cache(t), return_lse=True),
    "process_logits": lambda t: ops.process_logits(
        t["logits"],
        tables(t),
        slots=t["places"],
        counters=t["counters"],
        tokens=t["tokens"],
        repetition_penalty=t["penalty"],
        seen=t["seen"],
    ),
    "quantize_asymmetric": lambda t: ops.quantize_asymmetric(t["x"]),
    "quantize_per_group": lambda t: ops.quantize_per_group(t["x"], power_of_two=True),
    "quantize_per_tensor": lambda t: ops.quantize_per_tensor(
        t["x"], t["scale"], INT8, zero_point=t["zero"]
    ),
    "quantize_per_token": lambda t: ops.quantize_per_token(t["x"], E4M3),
    "rms_norm": lambda t: ops.rms_norm(*norm(t), residual=t["residual"]),
    "rms_norm_quantize": lambda t: ops.rms_norm_quantize(*norm(t), INT8, scale=t["scale"]),
    "rms_norm_quantize_asymmetric": lambda t: ops.rms_norm_quantize_asymmetric(*norm(t)),
    "rms_norm_quantize_per_group": lambda t: ops.rms_norm_quantize_per_group(*norm(t)),
    "rms_norm_w8a8_linear": lambda t: ops.rms_norm_w8a8_linear(
        *norm(t), t["w8"], t["w_scale"], residual=t["residual"], batch_invariant=True
    ),
    "rms_norm_w8a8_mlp": lambda t: ops.rms_norm_w8a8_mlp(
        *(*norm(t), t["w8"], t["w_scale"], t["w8"][:, : N // 2], t["w_scale"], "silu_mul"),
        residual=t["residual"],
        batch_invariant=True,
    ),
    "rms_norm_w8a8_logits": lambda t: ops.rms_norm_w8a8_logits(
        *(*norm(t), t["head8"], t["head_scale"]),
        temperature=t["temperature"],
        batch_invariant=True,
    ),
    "sample": lambda t: ops.sample(t["logits"], **sampling(t)),
    "silu_mul": lambda t: ops.silu_mul(t["gated"]),
    "silu_mul_quantize": lambda t: ops.silu_mul_quantize(t["gated"], INT8),
    "silu_mul_quantize_per_group": lambda t: ops.silu_mul_quantize_per_group(t["gated"]),
    "softcap": lambda t: ops.softcap(t["logits"], 2.5),
    "token_logprobs": lambda t: ops.token_logprobs(
        t["logits"], t["tokens"], wanted=t["wanted"], slots=t["places"], most=3
    ),
    "varlen_attention": lambda t: ops.varlen_attention(
        t["q"], t["k"], t["v"], t["cu_seqlens"], t["cu_seqlens"], 2, 2
    ),
    "w8a8_linear": lambda t: ops.w8a8_linear(
        t["x8"], t["w8"], t["x_scale"], t["w_scale"], bias=t["bias"]
    ),
}


def flat(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an op's result, but for logits that are not defined for greedy rows."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, ops.Logits):
        yield from [result.values] if result.argmax is None else []
    elif isinstance(result, MoePlan):  # whose tiles are not defined beyond the last one
        yield from (result.ids, result.weights, result.rows, result.offsets, result.n_tiles)
    elif isinstance(result, tuple):
        for item in result:
            yield from flat(item)


def all_of(names: list[str]) -> Callable[[Tensors], list[torch.Tensor]]:
    """Return a function that calls ops one after another, and returns all they made."""

    def step(t: Tensors) -> list[torch.Tensor]:
        results = [tensor for name in names for tensor in flat(CALLS[name](t))]
        return [*results, *(t[name].clone() for name in WRITTEN)]

    return step


def clones(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def check(names: list[str], device: torch.device, **options: Any) -> None:
    """Demand of a compiled function the bits of the same function, for two draws of numbers.

    Args:
        names: of ops.
        device: of the tensors.
        options: of torch.compile.
    """
    step = all_of(names)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, **options)
    held = inputs(device, 0)
    for name in WRITTEN:
        # Torch records no graph that writes to an input, but for one that stays where it is.
        torch._dynamo.mark_static_address(held[name])
    # With reduce-overhead the first two calls warm up and record, and the others replay.
    for draw in (0, 0, 0, 1, 0):
        given = inputs(device, draw)
        expected = step(clones(given))
        for name, tensor in given.items():  # where a captured graph reads
            held[name].copy_(tensor)
        got = compiled(held)
        assert len(got) == len(expected) >= len(WRITTEN)
        for ours, eager in zip(got, expected, strict=True):
            assert_same_bits(ours, eager)


def test_each_public_op_has_a_case() -> None:
    """A new op needs a case above, so that it is known to be compiled."""
    assert sorted(CALLS) == sorted(OPS)


def test_what_a_gpu_runs_is_a_constant_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_driver_capability", lambda device: (9, 0))
    compiled = torch.compile(lambda x: x + runs(GemmTiled, 77), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 1


def test_a_traced_product_leaves_the_best_to_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w8a8_gemm, "gpu", lambda device: ("", H200_SMS))
    x, w = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (64, 32000))
    assert w8a8_gemm.argmax_parts(x, 32000, w, True) > 0
    traced = torch.compile(
        lambda x: x[0, 0] + w8a8_gemm.argmax_parts(x, 32000, w, True),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    assert traced(x).item() == 0


def test_all_ops_trace_into_one_graph(device: torch.device) -> None:
    check(OPS, device, backend="aot_eager")


@pytest.mark.parametrize("name", effort(["w8a8_linear"], OPS))
def test_an_op_compiles_alone(name: str, device: torch.device) -> None:
    check([name], device, backend="aot_eager", dynamic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [OPS, *([name] for name in OPS)], ids=["all", *OPS])
def test_ops_replay_with_reduced_overhead(names: list[str]) -> None:
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    check(names, torch.device("cuda"), mode="reduce-overhead")
    assert counters["cudagraph_skips"] == 0, "there was no graph to replay"
