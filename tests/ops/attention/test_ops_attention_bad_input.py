"""What the attention ops refuse, and with which words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops_cases import ABSURD_PAGE, E4M3, PagedCase, int32

from ostinato import ops

CPU = torch.device("cpu")


def call_paged(changes: dict[str, Any], case: PagedCase | None = None) -> None:
    (q, k_cache, v_cache, table, lens), options = (case or PagedCase()).build(CPU)
    out = torch.full_like(q, 5.0)
    arguments = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": table,
        "seq_lens": lens,
        "out": out,
        **options,
        **changes,
    }
    try:
        ops.paged_attention(**arguments)
    finally:
        assert (out == 5.0).all()


PAGED = [
    ({"q": [1.0]}, TypeError, "q: got list, expected a tensor"),
    ({"q": torch.zeros(4, 4, 16, dtype=torch.float64)}, TypeError, "q: got dtype torch.float64"),
    ({"q": torch.zeros(4, 16)}, ValueError, r"q: got shape \[4, 16\], expected \[tokens, heads_q"),
    ({"q": torch.zeros(3, 4, 16)}, ValueError, r"q: got 3 tokens, expected .* 4 \* 1"),
    ({"q": torch.zeros(4, 5, 16)}, ValueError, "heads_q = 5, expected a multiple of heads_kv = 2"),
    ({"q": torch.zeros(4, 0, 16)}, ValueError, "q: got heads_q = 0"),
    (
        {"q": torch.zeros(4, 4, 32)[..., ::2]},
        ValueError,
        "q: got strides .* expected 1 in the last",
    ),
    ({"k_cache": torch.zeros(9, 8, 2, 8)}, ValueError, r"k_cache: got shape \[9, 8, 2, 8\]"),
    ({"k_cache": torch.zeros(0, 8, 2, 16)}, ValueError, "k_cache: got pages = 0"),
    ({"k_cache": torch.zeros(9, 0, 2, 16)}, ValueError, "k_cache: got page_size = 0"),
    ({"k_cache": torch.zeros(9, 8, 0, 16)}, ValueError, "k_cache: got heads_kv = 0"),
    ({"k_cache": torch.zeros(9, 8, 2, 16).bfloat16()}, TypeError, "k_cache: got dtype torch.bfl"),
    ({"v_cache": torch.zeros(9, 8, 2, 16)}, ValueError, r"v_cache: got shape \[9"),
    ({"v_cache": torch.zeros(12, 8, 2, 0)}, ValueError, "v_cache: got value_dim = 0"),
    ({"v_cache": torch.zeros(12, 8, 2)}, ValueError, r"v_cache: .* expected \[12, 8, 2, value_dim"),
    ({"v_cache": torch.zeros(12, 8, 2, 8)}, ValueError, r"out: .* expected \[4, 4, 8\]"),
    ({"page_table": torch.zeros(4, 7, dtype=torch.int64)}, TypeError, "page_table: got dtype"),
    ({"page_table": torch.zeros(4, 0, dtype=torch.int32)}, ValueError, "max_pages = 0"),
    ({"seq_lens": int32([1, 2, 3], CPU)}, ValueError, r"seq_lens: got shape \[3\], expected \[4\]"),
    ({"seq_lens": torch.ones(4)}, TypeError, "seq_lens: got dtype torch.float32"),
    ({"max_seqlen_q": 0}, ValueError, "max_seqlen_q: got 0, expected at least 1"),
    ({"max_seqlen_q": 1.0}, TypeError, "max_seqlen_q: got float, expected an int"),
    ({"max_seqlen_q": True}, TypeError, "max_seqlen_q: got bool"),
    ({"max_tokens_k": 0}, ValueError, "max_tokens_k: got 0, expected at least 1"),
    ({"max_tokens_k": 2.0}, TypeError, "max_tokens_k: got float, expected an int"),
    (
        {"max_tokens_k": 13, "check_bounds": True},
        ValueError,
        "max_tokens_k: got 13, expected at least the ",
    ),
    ({"cu_seqlens_q": int32([0, 4], CPU)}, ValueError, r"cu_seqlens_q: got shape \[2\]"),
    ({"cu_seqlens_q": int32([-1, 0, 1, 2, 3], CPU)}, ValueError, "cu_seqlens_q: got -1 first"),
    ({"cu_seqlens_q": int32([0, 2, 2, 3, 4], CPU)}, ValueError, "got length 2 for sequence 0"),
    ({"cu_seqlens_q": int32([0, 1, 0, 1, 2], CPU)}, ValueError, "got length -1 for sequence 1"),
    ({"cu_seqlens_q": int32([0, 1, 2, 3, 5], CPU), "max_seqlen_q": 2}, ValueError, "got 5 last"),
    (
        {"k_cache": torch.zeros(9, 8, 2, 16, device="meta")},
        ValueError,
        "k_cache: got a tensor on m",
    ),
    ({"causal": 1}, TypeError, "causal: got int, expected a bool"),
    ({"scale": math.nan}, ValueError, "scale: got nan, expected a finite number"),
    ({"scale": torch.ones(())}, TypeError, "scale: got Tensor, expected a number"),
    ({"softcap": -1.0}, ValueError, "softcap: got -1.0, expected a finite number of at least 0"),
    ({"softcap": math.inf}, ValueError, "softcap: got inf"),
    ({"softcap": 1e39}, ValueError, r"softcap: got 1e\+39, expected a finite number"),
    ({"softcap": 1e-50}, ValueError, "softcap: got 1e-50, expected 0 or at least 1e-30"),
    ({"scale": -1e39}, ValueError, r"scale: got -1e\+39, expected a finite number"),
    ({"window": 4}, TypeError, r"window: got 4, expected a tuple \(left, right\)"),
    ({"window": (1, 2, 3)}, TypeError, "window: got"),
    ({"window": (-2, 0)}, ValueError, "window: got -2, expected at least -1"),
    ({"window": (1, 0.5)}, TypeError, "window: got float"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks: got shape \[2\], expected \[4\]"),
    ({"sinks": torch.zeros(4).half()}, TypeError, "sinks: got dtype torch.float16"),
    ({"k_scale": torch.ones(2)}, ValueError, "k_scale: got a tensor, expected None for torch.fl"),
    ({"out": torch.zeros(4, 4, 8)}, ValueError, "out: got shape"),
    ({"out": torch.zeros(4, 4, 16).half()}, TypeError, "out: got dtype torch.float16"),
    ({"workspace": torch.zeros(8)}, TypeError, "workspace: got dtype torch.float32"),
    ({"workspace": torch.zeros(8, 8, dtype=torch.uint8)}, ValueError, "workspace: got shape"),
    ({"check_bounds": None}, TypeError, "check_bounds: got NoneType, expected a bool"),
    ({"stream": 3}, ValueError, "stream: got 3, expected None for tensors on cpu"),
    ({"seq_lens": int32([1, 7, 57, 3], CPU), "check_bounds": True}, ValueError, "seq_lens: got 57"),
    ({"seq_lens": int32([1, -1, 7, 3], CPU), "check_bounds": True}, ValueError, "seq_lens: got -1"),
    (
        {"seq_lens": int32([1, 7, 17, 3], CPU), "check_bounds": True},
        ValueError,
        r"page_table: got page 2147480000 at \[2, 2\], expected 0 to",
    ),
]


@pytest.mark.parametrize(("changes", "error", "match"), PAGED, ids=[row[2] for row in PAGED])
def test_paged_attention(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call_paged(changes)


@pytest.mark.parametrize("cache_dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("scale", "error", "match"),
    [
        (None, ValueError, "got None, expected an fp32 tensor"),
        (0.5, TypeError, "got float, expected a tensor"),
        (torch.ones(3), ValueError, r"got shape \[3\], expected \[2\]"),
        (torch.ones(8, 2), ValueError, r"got shape \[8, 2\]"),
        (torch.ones(1, 8, 2), ValueError, r"got shape \[1, 8, 2\]"),
        (torch.ones(2).bfloat16(), TypeError, "got dtype torch.bfloat16"),
    ],
    ids=str,
)
def test_scales(
    cache_dtype: torch.dtype, name: str, scale: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"{name}: {match}"):
        call_paged({name: scale}, PagedCase(cache_dtype=cache_dtype))


def test_an_expanded_output() -> None:
    (q, *rest), options = PagedCase().build(CPU)
    for expanded in (q[:1].expand(4, 4, 16), q[:, :1].expand(4, 4, 16)):
        with pytest.raises(ValueError, match=r"out: got strides .* that share no memory"):
            ops.paged_attention(q, *rest, **options, out=expanded)


def test_check_bounds_minds_the_window() -> None:
    (q, k_cache, v_cache, table, lens), options = PagedCase(k_lens=(20,), window=(4, -1)).build(CPU)
    assert table[0, 0] == ABSURD_PAGE
    ops.paged_attention(q, k_cache, v_cache, table, lens, **options, check_bounds=True)
    options["window"] = (19, -1)
    with pytest.raises(ValueError, match=r"page_table: got page 2147480000 at \[0, 0\]"):
        ops.paged_attention(q, k_cache, v_cache, table, lens, **options, check_bounds=True)


def test_a_live_page_id_out_of_range_is_never_read() -> None:
    (q, k_cache, v_cache, table, lens), options = PagedCase().build(CPU)
    table[3, 0] = 1000
    with pytest.raises(IndexError):
        ops.paged_attention(q, k_cache, v_cache, table, lens, **options)


VARLEN = [
    ({"k": torch.zeros(6, 2, 8)}, ValueError, r"k: got shape .* expected \[total_k, heads_kv, 16"),
    ({"k": torch.zeros(6, 2, 16).half()}, TypeError, "k: got dtype torch.float16"),
    ({"k": torch.zeros(6, 0, 16)}, ValueError, "k: got heads_kv = 0"),
    ({"v": torch.zeros(5, 2, 16)}, ValueError, r"v: got shape .* expected \[6, 2, value_dim\]"),
    ({"v": torch.zeros(6, 1, 16)}, ValueError, r"v: got shape .* expected \[6, 2, value_dim\]"),
    ({"v": torch.zeros(6, 2)}, ValueError, r"v: got shape \[6, 2\], expected \[6, 2, value_dim\]"),
    ({"v": torch.zeros(6, 2, 0)}, ValueError, "v: got value_dim = 0, expected at least 1"),
    (
        {"v": torch.zeros(6, 2, 16).half()},
        TypeError,
        "v: got dtype torch.float16, expected torch.f",
    ),
    (
        {"v": torch.zeros(6, 2, 8), "out": torch.zeros(5, 4, 16)},
        ValueError,
        r"out: got shape \[5, 4, 16\], expected \[5, 4, 8\]",
    ),
    ({"q": torch.zeros(5, 3, 16)}, ValueError, "heads_q = 3, expected a multiple of heads_kv = 2"),
    ({"cu_seqlens_q": int32([], CPU)}, ValueError, r"cu_seqlens_q: got batch \+ 1 = 0"),
    ({"cu_seqlens_q": int32([1, 2, 5], CPU)}, ValueError, "cu_seqlens_q: got 1 first, expected 0"),
    ({"cu_seqlens_q": int32([0, 5], CPU)}, ValueError, r"cu_seqlens_k: got shape \[3\]"),
    ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, TypeError, "cu_seqlens_q: got dtype torch.int64"),
    ({"cu_seqlens_q": int32([0, 4, 5], CPU)}, ValueError, "cu_seqlens_q: got length 4"),
    ({"cu_seqlens_k": int32([0, 3, 2], CPU)}, ValueError, "cu_seqlens_k: got length -1"),
    ({"cu_seqlens_k": int32([0, 3, 7], CPU)}, ValueError, "cu_seqlens_k: got 7 last"),
    ({"max_seqlen_k": 0}, ValueError, "max_seqlen_k: got 0"),
    ({"k_scale": torch.ones(2)}, ValueError, "k_scale: got a tensor, expected None"),
    ({"out": torch.zeros(4, 4, 16)}, ValueError, "out: got shape"),
    ({"out": torch.zeros(1, 4, 16).expand(5, 4, 16)}, ValueError, "out: got strides"),
    ({"check_bounds": 1}, TypeError, "check_bounds: got int, expected a bool"),
    ({"stream": object()}, ValueError, "stream: got"),
]


@pytest.mark.parametrize(("changes", "error", "match"), VARLEN, ids=[row[2] for row in VARLEN])
def test_varlen_attention(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(5, 4, 16),
        "k": torch.zeros(6, 2, 16),
        "v": torch.zeros(6, 2, 16),
        "cu_seqlens_q": int32([0, 2, 5], CPU),
        "cu_seqlens_k": int32([0, 2, 6], CPU),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    with pytest.raises(error, match=match):
        ops.varlen_attention(**{**arguments, **changes})


FP8 = [
    ({"q_scale": None}, ValueError, "q_scale: got None, expected an fp32 tensor"),
    ({"q_scale": torch.ones(4)}, ValueError, r"q_scale: got shape \[4\], expected \[2\]"),
    ({"q_scale": torch.ones(5, 2)}, ValueError, r"q_scale: got shape \[5, 2\], expected \[1\]"),
    ({"q_scale": torch.ones(2).half()}, TypeError, "q_scale: got dtype torch.float16"),
    ({"q_scale": 1.0}, TypeError, "q_scale: got float, expected a tensor"),
    ({"k_scale": None}, ValueError, "k_scale: got None"),
    ({"k": torch.zeros(6, 2, 16).bfloat16()}, TypeError, "k: got dtype torch.bfloat16, expected"),
    ({"k": torch.zeros(6, 2, 16, dtype=torch.int8)}, TypeError, "k: got dtype torch.int8"),
    ({"v": torch.zeros(6, 2, 16).bfloat16()}, TypeError, "v: got dtype torch.bfloat16"),
    ({"out": torch.zeros(5, 4, 16)}, TypeError, "out: got dtype torch.float32, expected torch.bf"),
    ({"out": torch.zeros(5, 4, 16).to(E4M3)}, TypeError, "out: got dtype torch.float8_e4m3fn"),
    ({"out": [1.0]}, TypeError, "out: got list, expected torch.bfloat16 or"),
    ({"out": torch.zeros(5, 4, 8).half()}, ValueError, "out: got shape"),
    ({"q": torch.zeros(5, 4, 16)}, ValueError, "q_scale: got a tensor, expected None for torch.fl"),
]


@pytest.mark.parametrize(("changes", "error", "match"), FP8, ids=[row[2] for row in FP8])
def test_fp8_queries(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(5, 4, 16).to(E4M3),
        "k": torch.zeros(6, 2, 16).to(E4M3),
        "v": torch.zeros(6, 2, 16).to(E4M3),
        "cu_seqlens_q": int32([0, 2, 5], CPU),
        "cu_seqlens_k": int32([0, 2, 6], CPU),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
        **{f"{name}_scale": torch.ones(()) for name in "qkv"},
    }
    ops.varlen_attention(**arguments)
    with pytest.raises(error, match=match):
        ops.varlen_attention(**{**arguments, **changes})
