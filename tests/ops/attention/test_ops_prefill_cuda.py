"""Which kernel attends to many queries of a sequence."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ostinato.ops.attention import dequantize_kv, prefill_cuda
from ostinato.ops.attention.prefill_cuda import (
    Fp8Scales,
    attend_packed,
    attend_paged,
    fp8_variant,
    kernel_for,
    packed_variant,
    paged_variant,
    prefers_many_rows,
    prefill_kernels,
)
from ostinato.ops.attention.softmax_torch import LogitRule

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_cuda, "has_kernel", lambda family, x: True)
    monkeypatch.setattr(prefill_cuda, "gpu", lambda device: ("", 132))


def packed(tokens: int = 5, dim: int = 64, **options: Any) -> list[torch.Tensor]:
    options = {"dtype": BF16, **options}
    return [torch.empty(tokens, 2, dim, **options) for _ in range(4)]


@pytest.mark.parametrize("keys", ["packed", "pages", "slots"])
def test_keys_lie_in_one_of_three_ways(keys: str) -> None:
    kernel = kernel_for(FP16, 192, keys)
    assert kernel is not None
    assert (kernel.keys, kernel.dtype, kernel.value_dim) == (keys, "fp16", 192)


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 128), (BF16, 120), (BF16, 272), (FP16, 8)]
)
def test_there_is_no_kernel_for_others(dtype: torch.dtype, dim: int) -> None:
    assert kernel_for(dtype, dim, "packed") is None


@pytest.mark.parametrize(("page_size", "keys"), [(16, "pages"), (48, "pages"), (20, "slots")])
def test_pages_of_a_multiple_of_16_tokens_are_copied(page_size: int, keys: str) -> None:
    q, *_, out = packed()
    k_cache, v_cache = (torch.empty(3, page_size, 2, 64, dtype=BF16) for _ in "kv")
    table = torch.zeros(1, 3, dtype=torch.int32)
    kernel = paged_variant(q, k_cache, v_cache, table, out)
    assert kernel is not None
    assert kernel.keys == keys


@pytest.mark.parametrize("keys", ["packed", "pages", "slots"])
@pytest.mark.parametrize("dims", [(192, 128), (96, 64), (64, 128), (256, 16)], ids=str)
def test_values_may_have_another_dim(dims: tuple[int, int], keys: str) -> None:
    kernel = kernel_for(BF16, dims[0], keys, dims[1])
    assert kernel is not None
    assert (kernel.head_dim, kernel.value_dim, kernel.keys) == (*dims, keys)


@pytest.mark.parametrize("dims", [(192, 120), (192, 272), (192, 8), (192, 208), (200, 128)])
def test_there_is_no_kernel_for_other_values(dims: tuple[int, int]) -> None:
    assert kernel_for(BF16, dims[0], "packed", dims[1]) is None


def test_the_dim_of_values_is_theirs() -> None:
    q, k, _, _ = packed(dim=192)
    _, _, v, out = packed(dim=128)
    kernel = packed_variant(q, k, v, out)
    assert kernel is not None
    assert kernel.name == "attention_prefill-bf16-d192v128-packed"
    k_cache, v_cache = (torch.empty(3, 16, 2, dim, dtype=BF16) for dim in (192, 128))
    kernel = paged_variant(q, k_cache, v_cache, torch.zeros(1, 3, dtype=torch.int32), out)
    assert kernel is not None
    assert kernel.name == "attention_prefill-bf16-d192v128-pages"


@pytest.mark.parametrize("dims", [(128, 64), (64, 128)])
def test_larger_tiles_are_not_for_values_of_another_dim(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]
) -> None:
    monkeypatch.setattr(prefill_cuda, "prefers_many_rows", lambda *_: True)
    q, k, _, _ = packed(dim=dims[0])
    _, _, v, out = packed(dim=dims[1])
    kernel = packed_variant(q, k, v, out, 1, 5)
    assert kernel is not None
    assert kernel.warpgroups == 0


def packed_8_bit(cache: torch.dtype, dim: int = 128) -> list[torch.Tensor]:
    q, k, v, out = packed(dim=dim)
    return [q, k.to(cache), v.to(cache), out]


@pytest.mark.parametrize("cache", [torch.int8, E4M3])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_8_bit_keys_have_the_kernel_of_what_they_become(dim: int, cache: torch.dtype) -> None:
    tensors = packed_8_bit(cache, dim)
    kernel = dequantize_kv.variant(*tensors, 1, 5, tokens=5)
    assert kernel == packed_variant(*packed(dim=dim), 1, 5)
    assert packed_variant(*tensors) is None


@pytest.mark.parametrize("page_size", [16, 7])
def test_8_bit_pages_of_any_size_become_packed_keys(page_size: int) -> None:
    q, *_, out = packed(dim=128)
    k_cache, v_cache = (torch.empty(3, page_size, 2, 128, dtype=E4M3) for _ in "kv")
    kernel = dequantize_kv.variant(q, k_cache, v_cache, out, 1, 5, tokens=3 * page_size)
    assert kernel is not None
    assert kernel.keys == "packed"
    assert paged_variant(q, k_cache, v_cache, torch.zeros(1, 3, dtype=torch.int32), out) is None


@pytest.mark.parametrize(("batch_invariant", "warpgroups"), [(False, 3), (True, 0)])
def test_many_queries_over_8_bit_pages_have_larger_tiles(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool, warpgroups: int
) -> None:
    monkeypatch.setattr(prefill_cuda, "gpu", lambda device: ("", 4))
    q, *_, out = packed(4 * 4096, 128)
    k_cache, v_cache = (torch.empty(3, 16, 2, 128, dtype=E4M3) for _ in "kv")
    kernel = dequantize_kv.variant(
        q, k_cache, v_cache, out, 4, 4096, tokens=48, batch_invariant=batch_invariant
    )
    assert kernel is not None
    assert kernel.warpgroups == warpgroups


def test_other_8_bit_keys_are_left_to_torch() -> None:
    q, k, v, out = packed_8_bit(E4M3)
    odd = torch.empty(5 * 2 * 128 + 8, dtype=E4M3)[8:].view(5, 2, 128)
    for keys, values in ((odd, v), (k, odd), (k[:0], v[:0])):
        assert dequantize_kv.variant(q, keys, values, out, 1, 5, tokens=5) is None
    assert dequantize_kv.variant(q, k, v, out, 1, 5, tokens=1 << 29) is None
    assert dequantize_kv.variant(*packed(dim=128), 1, 5, tokens=5) is None
    fp32 = [torch.empty(5, 2, 128) for _ in range(2)]
    assert dequantize_kv.variant(fp32[0], k, v, fp32[1], 1, 5, tokens=5) is None


def test_a_model_with_an_8_bit_cache_needs_its_kernels() -> None:
    def names(dim: int, kv_dtype: torch.dtype, batch_invariant: bool) -> list[str]:
        found = dequantize_kv.prompt_kernels(BF16, dim, kv_dtype, batch_invariant=batch_invariant)
        return [kernel.name for kernel in found]

    attends = "attention_prefill-bf16-d128-packed"
    assert names(128, E4M3, True) == ["dequantize_kv-bf16-e4m3", attends]
    assert names(128, torch.int8, False) == ["dequantize_kv-bf16-int8", attends, f"{attends}-w3"]
    assert names(120, E4M3, True) == []
    assert names(128, BF16, True) == [kernel.name for kernel in prefill_kernels(BF16, 128)]


@pytest.mark.parametrize(
    ("tiles", "larger", "preferred"),
    [
        (4096, 3072, True),  # 16 texts of 1024, 32 heads
        (128, 96, False),  # 512 queries: a part of the GPU, for longer
        (256, 192, False),
        (2112, 1408, True),
        (132, 66, False),
        (140, 132, True),  # a second round beside one
    ],
)
def test_larger_tiles_are_for_many(tiles: int, larger: int, preferred: bool) -> None:
    assert prefers_many_rows(tiles, larger, 132) is preferred


@pytest.mark.parametrize(
    ("dim", "queries", "warpgroups"), [(128, 4096, 3), (128, 100, 0), (96, 4096, 0), (64, 4096, 0)]
)
def test_many_queries_have_a_kernel_of_larger_tiles(
    monkeypatch: pytest.MonkeyPatch, dim: int, queries: int, warpgroups: int
) -> None:
    monkeypatch.setattr(prefill_cuda, "gpu", lambda device: ("", 4))
    kernel = packed_variant(*packed(4 * queries, dim), 4, queries)
    assert kernel is not None
    assert kernel.warpgroups == warpgroups


@pytest.mark.parametrize(
    ("dim", "queries", "page_size", "batch_invariant", "warpgroups"),
    [
        *((128, 4096, 16, False, 3), (128, 4096, 16, True, 0), (128, 4096, 20, False, 0)),
        *((128, 100, 16, False, 0), (96, 4096, 16, False, 0), (64, 4096, 16, False, 0)),
    ],
)
def test_pages_of_many_queries_have_a_kernel_of_larger_tiles(
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    queries: int,
    page_size: int,
    batch_invariant: bool,
    warpgroups: int,
) -> None:
    """Unless a row's bits may not depend on how many there are."""
    monkeypatch.setattr(prefill_cuda, "gpu", lambda device: ("", 4))
    q, *_, out = packed(4 * queries, dim)
    k_cache, v_cache = (torch.empty(3, page_size, 2, dim, dtype=BF16) for _ in "kv")
    table = torch.zeros(4, 3, dtype=torch.int32)
    kernel = paged_variant(q, k_cache, v_cache, table, out, queries, batch_invariant)
    assert kernel is not None
    assert kernel.warpgroups == warpgroups


@pytest.mark.parametrize(
    ("dim", "gap", "heads", "keys"),
    [
        *((128, 8, 2, "slots"), (128, 64, 2, "pages"), (128, 8, 1, "pages")),
        *((64, 8, 2, "pages"), (96, 8, 2, "pages"), (256, 32, 2, "slots")),
    ],
)
def test_pages_are_copied_where_heads_begin_at_multiples_of_128_bytes(
    dim: int, gap: int, heads: int, keys: str
) -> None:
    """Those of at most 64 elements, and those that do not fill 128 bytes, anywhere."""
    q, *_, out = packed(dim=dim)
    k_cache, v_cache = (torch.empty(3, 16, heads, dim + gap, dtype=BF16)[..., :dim] for _ in "kv")
    kernel = paged_variant(q, k_cache, v_cache, torch.zeros(1, 3, dtype=torch.int32), out)
    assert kernel is not None
    assert kernel.keys == keys


def fp8(dim: int = 128, out_dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [*packed(dim=dim, dtype=E4M3)[:3], torch.empty(5, 2, dim, dtype=out_dtype)]


def scales(*shape: int) -> Fp8Scales:
    return Fp8Scales(*(torch.ones(shape) for _ in "qkv"))


@pytest.mark.parametrize("out_dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_fp8_queries_have_kernels(shape: tuple[int, ...], dim: int, out_dtype: torch.dtype) -> None:
    kernel = fp8_variant(*fp8(dim, out_dtype), scales(*shape))
    assert kernel is not None
    assert (kernel.dtype, kernel.head_dim, kernel.keys) == ("e4m3", dim, "packed")
    assert kernel.out_dtype == {BF16: "bf16", FP16: "fp16"}[out_dtype]


def test_fp8_kernels_do_not_take_everything() -> None:
    assert fp8_variant(*fp8(dim=96), scales()) is None
    assert fp8_variant(*fp8(), scales(5, 2)) is None
    q, k, v, out = fp8()
    assert fp8_variant(packed(dim=128)[0], k, v, out, scales()) is None
    assert fp8_variant(q[..., :64], k[..., :64], v[..., :64], out[..., :64], scales()) is not None
    odd = torch.empty(5 * 2 * 64 + 8, dtype=E4M3)[8:].view(5, 2, 64)
    assert fp8_variant(odd, k[..., :64], v[..., :64], out[..., :64], scales()) is None


@pytest.mark.parametrize(
    ("dim", "queries", "windowed", "warpgroups"),
    [
        *((128, 4096, False, 3), (128, 2048, False, 3), (128, 2047, False, 0)),
        *((128, 4096, True, 0), (64, 4096, False, 0), (256, 4096, False, 0)),
    ],
)
def test_many_fp8_queries_have_a_kernel_of_larger_tiles(
    monkeypatch: pytest.MonkeyPatch, dim: int, queries: int, windowed: bool, warpgroups: int
) -> None:
    """Unless they see few keys, where what begins and ends an item counts for more."""
    monkeypatch.setattr(prefill_cuda, "gpu", lambda device: ("", 4))
    tensors = packed(4 * queries, dim, dtype=E4M3)
    tensors[3] = tensors[3].to(BF16)
    kernel = fp8_variant(*tensors, scales(), 4, queries, windowed)
    assert kernel is not None
    assert kernel.warpgroups == warpgroups


def test_few_tiles_of_fp8_queries_are_the_usual_ones() -> None:
    tensors = packed(2048, 128, dtype=E4M3)
    tensors[3] = tensors[3].to(BF16)
    kernel = fp8_variant(*tensors, scales(), 1, 2048)
    assert kernel is not None
    assert kernel.warpgroups == 0


def test_fp8_values_of_another_dim_are_left_to_torch() -> None:
    q, k, v, out = fp8()
    assert fp8_variant(q, k, v[..., :64], out[..., :64], scales()) is None


def test_fp8_queries_are_not_for_the_16_bit_kernels() -> None:
    assert packed_variant(*fp8()) is None


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("how", ["address", "stride"])
def test_rows_must_begin_at_multiples_of_16_bytes(which: int, how: str) -> None:
    tensors = packed()
    if how == "address":
        tensors[which] = torch.empty(5 * 2 * 64 + 1, dtype=BF16)[1:].view(5, 2, 64)
    else:
        tensors[which] = torch.empty(5, 2, 68, dtype=BF16)[..., :64]
    assert packed_variant(*tensors) is None


def test_a_cache_without_pages_is_left_to_torch() -> None:
    q, *_, out = packed()
    k_cache, v_cache = (torch.empty(0, 16, 2, 64, dtype=BF16) for _ in "kv")
    assert paged_variant(q, k_cache, v_cache, torch.zeros(1, 1, dtype=torch.int32), out) is None


def test_a_model_needs_the_kernels_of_pages_and_of_slots() -> None:
    assert [kernel.keys for kernel in prefill_kernels(BF16, 64)] == ["pages", "slots"]
    assert prefill_kernels(torch.float32, 64) == []
    assert [kernel.warpgroups for kernel in prefill_kernels(BF16, 128)] == [0, 0]
    many = prefill_kernels(BF16, 128, batch_invariant=False)
    assert [(kernel.keys, kernel.warpgroups) for kernel in many] == [
        *(("pages", 0), ("pages", 3), ("slots", 0))
    ]


class Recorder:
    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def workspace_bytes(self) -> int:
        return 8

    def launch(self, **arguments: Any) -> None:
        self.launches.append(arguments)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Have launches recorded, with no GPU."""
    recorder = Recorder()
    for name, value in {
        "on_device": lambda device: nullcontext(),
        "current_stream": lambda device: 7,
        "load": lambda kernel, *, device, stream: recorder,
    }.items():
        for module in (prefill_cuda, dequantize_kv):
            monkeypatch.setattr(module, name, value)
    for module in (prefill_cuda, dequantize_kv):
        memory = torch.zeros(1 << 16, dtype=torch.uint8)
        monkeypatch.setattr(module._workspaces, "get", lambda device, stream, needed, of=memory: of)
    return recorder.launches


def test_a_launch_has_the_strides_of_values_of_another_dim(launches: list[dict[str, Any]]) -> None:
    q, k, _, _ = packed(dim=192)
    v, out = (torch.empty(5, 6, 128, dtype=BF16)[:, :2] for _ in range(2))
    kernel = packed_variant(q, k, v, out)
    assert kernel is not None
    offsets, rule = torch.tensor([0, 5], dtype=torch.int32), LogitRule(1.0, True, -1, -1, 0.0)
    attend_packed(kernel, q, k, v, offsets, offsets, 5, 5, rule, None, out, None, None)
    (launch,) = launches
    assert launch["k"] == (k.data_ptr(), 0, 2 * 192, 192)
    assert launch["v"] == (v.data_ptr(), 0, 6 * 128, 128)
    assert launch["out"] == (out.data_ptr(), 6 * 128, 128)


def launch_8_bit(launches: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """Attend to packed 8-bit keys with scales, given as `options`, and return the launches."""
    q, k, v, out = packed_8_bit(E4M3)
    kernel = dequantize_kv.variant(q, k, v, out, 1, 5, tokens=5)
    assert kernel is not None
    offsets, rule = torch.tensor([0, 5], dtype=torch.int32), LogitRule(1.0, True, -1, -1, 0.0)
    kv = dequantize_kv.QuantizedKV(k, v, **options)
    how = (offsets, offsets, 5, 5, rule, None, out, None, None)
    dequantize_kv.attend_packed(kernel, q, kv, *how)
    return launches


def test_a_launch_has_the_strides_of_scales(launches: list[dict[str, Any]]) -> None:
    by_head, by_token = torch.ones(2, 3)[:, 1], torch.ones(5, 2, 3)[..., 1]
    first, attends = launch_8_bit(launches, k_scale=torch.ones(()), v_scale=by_head)
    assert first["k_scale"][1:] == (0, 0, 0)
    assert first["v_scale"] == (by_head.data_ptr(), 0, 0, 3)
    assert (attends["k"], attends["v"]) == (
        (first["k_out"], 0, 2 * 128, 128),
        (first["v_out"], 0, 2 * 128, 128),
    )
    second = launch_8_bit(launches, k_scale=by_head, v_scale=by_token)[2]
    assert second["v_scale"] == (by_token.data_ptr(), 0, 6, 3)


def test_what_is_dequantised_lies_behind_what_attention_keeps(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = []
    memory = torch.zeros(1 << 20, dtype=torch.uint8)

    def get(device: int, stream: int, size: int) -> torch.Tensor:
        needed.append(size)
        return memory[:size]

    monkeypatch.setattr(dequantize_kv._workspaces, "get", get)
    first, attends = launch_8_bit(launches, k_scale=torch.ones(()), v_scale=torch.ones(()))
    assert attends["workspace"] == memory.data_ptr()
    size = 5 * 2 * 128 * 2
    assert first["k_out"] >= memory.data_ptr() + 8 + 4096
    assert first["v_out"] >= first["k_out"] + size
    assert first["v_out"] + size <= memory.data_ptr() + needed[0]
    assert first["k_out"] % 256 == 0 == first["v_out"] % 256


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_heads_share_tiles_only_where_rows_may_depend_on_other_sequences(
    batch_invariant: bool, launches: list[dict[str, Any]]
) -> None:
    """The kernel chooses by the average of the queries, and adds up in another order."""
    q, *_, out = packed(600)
    k_cache = torch.empty(3, 16, 2, 64, dtype=BF16)
    table, lens = torch.zeros(600, 3, dtype=torch.int32), torch.ones(600, dtype=torch.int32)
    kernel = paged_variant(q, k_cache, k_cache, table, out)
    assert kernel is not None
    rule = LogitRule(1.0, True, -1, -1, 0.0)
    given = (q, k_cache, k_cache, table, lens, None, 1, rule, None)
    attend_paged(kernel, *given, batch_invariant, out, None, None)
    assert [launch["pack"] for launch in launches] == [int(batch_invariant)] * 2
    assert [launch["batch"] for launch in launches] == [512, 88]
    assert launches[1]["q"][0] == q[512].data_ptr()
