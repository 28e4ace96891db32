"""Which kernel attends in decode steps."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from ostinato.ops.attention import decode_cuda
from ostinato.ops.attention.decode_cuda import decode_kernels, kernel_for
from ostinato.ops.attention.decode_variants import (
    SPLIT_TOKENS,
    AttentionDecode,
    DecodeLoad,
    decode_cluster,
)

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 64), (64, 64)]
)
def test_rows_fit_in_the_columns(rows: int, columns: int) -> None:
    kernel = kernel_for(
        BF16, torch.int8, 128, rows, copy_pages=False, batch_invariant=False, load="some"
    )
    assert kernel is not None
    assert (kernel.columns, kernel.kv_dtype, kernel.copy_pages) == (columns, "int8", False)


@pytest.mark.parametrize(
    ("dtype", "dim", "rows"),
    [
        *((torch.float32, 128, 1), (BF16, 120, 1), (BF16, 272, 1), (BF16, 128, 65)),
        *((FP16, 256, 33), (FP16, 128, 0)),
    ],
)
def test_there_is_no_kernel_for_others(dtype: torch.dtype, dim: int, rows: int) -> None:
    found = kernel_for(dtype, dtype, dim, rows, copy_pages=True, batch_invariant=False, load="few")
    assert found is None


@pytest.mark.parametrize(("value_dim", "served"), [(128, True), (64, False), (192, False)])
def test_values_of_another_dim_are_not_for_decode_kernels(
    monkeypatch: pytest.MonkeyPatch, value_dim: int, served: bool
) -> None:
    monkeypatch.setattr(decode_cuda, "has_kernel", lambda family, x: True)
    q, out = torch.empty(4, 2, 128, dtype=BF16), torch.empty(4, 2, value_dim, dtype=BF16)
    k_cache, v_cache = (torch.empty(3, 16, 2, dim, dtype=BF16) for dim in (128, value_dim))
    table = torch.zeros(4, 3, dtype=torch.int32)
    found = decode_cuda.variant(q, k_cache, v_cache, table, 1, False, out)
    assert (found is not None) is served


def test_lengths_of_prompts_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cuda, "has_kernel", lambda family, x: True)
    cache, table = torch.empty(3, 16, 2, 128, dtype=BF16), torch.zeros(1, 3, dtype=torch.int32)
    before = kernel_for.cache_info().currsize
    for tokens in range(100, 110):
        q = torch.empty(tokens, 2, 128, dtype=BF16)
        assert decode_cuda.variant(q, cache, cache, table, tokens, False, q) is None
    assert kernel_for.cache_info().currsize == before


@pytest.mark.parametrize("expand", ["q", "k_cache", "v_cache", "out"])
def test_heads_that_share_memory_are_not_for_kernels(
    monkeypatch: pytest.MonkeyPatch, expand: str
) -> None:
    monkeypatch.setattr(decode_cuda, "has_kernel", lambda family, x: True)
    tensors = {name: torch.empty(4, 2, 128, dtype=BF16) for name in ("q", "out")}
    tensors |= {x: torch.empty(3, 16, 2, 128, dtype=BF16) for x in ("k_cache", "v_cache")}
    table = torch.zeros(4, 3, dtype=torch.int32)
    how = {"page_table": table, "max_seqlen_q": 1, "batch_invariant": False}
    assert decode_cuda.variant(**tensors, **how) is not None
    tensors[expand] = tensors[expand][..., :1, :].expand(tensors[expand].shape)
    assert decode_cuda.variant(**tensors, **how) is None


def test_a_models_steps_take_kernels_for_each_load_and_kind_of_page() -> None:
    names = [kernel.name for kernel in decode_kernels(FP16, 96, 8)]
    assert names == [
        "attention_decode-fp16-d96-c8-split1024-cluster4",
        "attention_decode-fp16-d96-c8-split1024",
        "attention_decode-fp16-d96-c8-any_page-split1024",
    ]
    assert decode_kernels(torch.float32, 96, 12) == []


def test_without_fixed_splits_the_ends_of_prompts_take_kernels_of_more_rows() -> None:
    def clusters(dim: int, group: int) -> dict[int, list[tuple[bool, int]]]:
        found: dict[int, list[tuple[bool, int]]] = {}
        for kernel in decode_kernels(FP16, dim, group, batch_invariant=False):
            found.setdefault(kernel.columns, []).append((kernel.copy_pages, kernel.cluster))
        return found

    shared, alone = [(True, 8), (True, 2), (True, 1), (False, 1)], [(True, 1), (False, 1)]
    assert clusters(96, 12) == {16: shared, 32: alone, 64: alone}
    assert clusters(96, 8) == {8: shared, 16: shared, 32: alone, 64: alone}
    assert set(clusters(256, 33)) == set()
    assert set(clusters(256, 4)) == {8, 16, 32}


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("copy_pages", [True, False])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 144, 256])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_every_load_has_a_kernel(
    dim: int, columns: int, copy_pages: bool, quantized: bool, batch_invariant: bool
) -> None:
    for load in get_args(DecodeLoad):
        cluster = decode_cluster(
            load,
            head_dim=dim,
            columns=columns,
            copy_pages=copy_pages,
            quantized=quantized,
            batch_invariant=batch_invariant,
        )
        kernel = AttentionDecode(
            head_dim=dim,
            dtype="bf16",
            kv_dtype="int8" if quantized else "bf16",
            columns=columns,
            copy_pages=copy_pages,
            split_tokens=SPLIT_TOKENS if batch_invariant else 0,
            cluster=cluster,
        )
        assert not batch_invariant or kernel.cluster in (1, 4)


@pytest.mark.parametrize(
    "fields",
    [{"cluster": 2}, {"cluster": 4, "columns": 16}, {"cluster": 4, "kv_dtype": "e4m3", "dim": 64}],
)
def test_a_cluster_of_other_bits_is_refused(fields: dict[str, Any]) -> None:
    dim = fields.pop("dim", 128)
    with pytest.raises(ValueError, match=f"cluster: got {fields['cluster']}, expected 1"):
        AttentionDecode(head_dim=dim, dtype="bf16", split_tokens=SPLIT_TOKENS, **fields)


@pytest.mark.parametrize(
    ("batch", "heads_kv", "tokens", "free", "split"),
    [
        (1, 8, 512, 8, 4),
        (1, 8, 2048, 8, 4),
        (1, 8, 2064, 2, 4),
        (1, 8, 7168, 2, 4),
        (1, 8, 7184, 2, 1),
        (1, 1, 16384, 8, 4),
        (2, 8, 1024, 8, 4),
        (4, 8, 1024, 2, 4),
        (5, 8, 512, 2, 1),
        (8, 8, 512, 2, 1),
        (17, 1, 64, 2, 4),
        (16, 8, 512, 2, 1),
        (17, 8, 512, 1, 1),
        (17, 8, 2048, 1, 1),
        (17, 8, 2064, 2, 1),
        (600, 1, 16, 1, 1),
    ],
)
def test_the_room_in_the_page_table_decides_how_many_share_a_sequence(
    batch: int,
    heads_kv: int,
    tokens: int,
    free: int,
    split: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_cuda, "has_kernel", lambda family, x: True)
    q = torch.empty(batch, 4 * heads_kv, 128, dtype=BF16)
    cache = torch.empty(1, 16, heads_kv, 128, dtype=BF16)
    table = torch.zeros(batch, tokens // 16, dtype=torch.int32)
    for batch_invariant, expected in ((False, free), (True, split)):
        kernel = decode_cuda.variant(
            q, cache, cache, table, 1, batch_invariant, torch.empty_like(q)
        )
        assert kernel is not None
        assert kernel.cluster == expected
