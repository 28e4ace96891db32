"""What each kernel adds to a step: sums to the step, whatever overlaps."""

from __future__ import annotations

import pytest
import torch

from ostinato.bench.step.breakdown import Span, shares_of, short_name, sites_of, trace


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void ostinato::gemm::(anonymous namespace)::tiled_gemm<8, true>(Params)", "tiled_gemm"),
        ("ostinato::decode::paged_decode<true>(Arguments, CacheMaps)", "paged_decode"),
        ("void at::native::index_kernel<at::native::Op<4>>(int)", "index_kernel"),
        ("ostinato_advance", "ostinato_advance"),
        ("Memcpy HtoD (Pinned -> Device)", "memcpy"),
        ("Memset (Device)", "memset"),
    ],
)
def test_names_lose_types_and_arguments(name: str, short: str) -> None:
    assert short_name(name) == short


def test_what_overlaps_is_counted_once() -> None:
    run = [
        Span(10.0, 14.0, "gemm"),
        Span(11.0, 16.0, "norm"),
        Span(12.0, 13.0, "memcpy"),
        Span(15.5, 20.0, "gemm"),
    ]
    shares = {share.name: share for share in shares_of([run], [span.name for span in run])}
    assert {name: share.added_us for name, share in shares.items()} == {
        "gemm": 1.0 + 4.0,
        "norm": 2.0,
        "memcpy": 1.0,
    }
    assert shares["gemm"].launches == 2
    assert shares["gemm"].running_us == 8.5
    assert sum(share.added_us for share in shares.values()) == 20.0 - 12.0


def test_a_slow_run_does_not_move_the_shares() -> None:
    runs = [[Span(0.0, 2.0, "a"), Span(1.0, 2.0 + late, "b")] for late in (3.0, 3.0, 90.0)]
    assert [(share.name, share.added_us) for share in shares_of(runs, ["a", "b"])] == [
        ("b", 3.0),
        ("a", 2.0),
    ]


def test_nothing_gives_no_shares() -> None:
    assert shares_of([[], []], []) == []


LINEARS = ("qkv", "o", "gate_up", "down")
ONE = (*LINEARS, "lm_head")
LAYER = ["quantize_rows", "tiled_gemm", "append_heads", "paged_decode", "quantize_rows"]
LAYER += ["small_m_gemm", "quantize_rows", "tiled_gemm", "quantize_rows", "tiled_gemm"]
SITES = ["quantize_rows (qkv)", "qkv", "append_heads (attention)", "attention", "quantize_rows (o)"]
SITES += ["o", "quantize_rows (gate_up)", "gate_up", "quantize_rows (down)", "down"]


def test_kernels_of_a_step_are_named_by_what_they_do() -> None:
    names = ["multi_tensor_apply_kernel", "memcpy", "embed", *LAYER * 3, "quantize_rows"]
    assert sites_of([*names, "tiled_gemm", "sample_rows"], 3, [*LINEARS * 3, "lm_head"]) == [
        "inputs",
        "memcpy (qkv)",
        "embed (qkv)",
        *SITES * 3,
        "quantize_rows (lm_head)",
        "lm_head",
        "sample_rows",
    ]


def test_another_librarys_output_projection_keeps_its_name() -> None:
    assert sites_of([*LAYER, "nvjet", "sample_rows"], 1, ONE) == [*SITES, "nvjet", "sample_rows"]


def test_grouped_products_of_experts_are_named() -> None:
    attended = ["fused_linear", "append_heads", "paged_decode", "tiled_gemm", "quantize_rows"]
    experts = ["tiled_gemm", "moe_route", "quantize_rows", "moe_linear", "quantize_rows"]
    names = [*attended, *experts, "moe_linear", "moe_combine", "tiled_gemm", "sample_rows"]
    linears = ("qkv", "o", "router", "lm_head")
    assert sites_of(names, 1, linears, ("experts_gate_up", "experts_down")) == [
        *("qkv", "append_heads (attention)", "attention", "o", "quantize_rows (router)"),
        *("router", "moe_route (experts_gate_up)", "quantize_rows (experts_gate_up)"),
        *("experts_gate_up", "quantize_rows (experts_down)", "experts_down"),
        *("moe_combine (lm_head)", "lm_head", "sample_rows"),
    ]
    assert sites_of(names, 1, linears) == names


def test_fused_products_are_named_alike() -> None:
    names = ["fused_linear", "append_heads", "paged_decode", "quantize_rows", "small_m_gemm"]
    names += ["fused_linear", "quantize_rows", "small_m_gemm"]
    assert [site for site in sites_of(names, 1, ONE) if "(" not in site] == [
        "qkv",
        "attention",
        "o",
        "gate_up",
        "down",
    ]


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_step_of_other_kernels_keeps_their_names(layers: int) -> None:
    names = [*LAYER * 2, "tiled_gemm"]
    assert sites_of(names, layers, ONE) == names
    assert sites_of(["nvjet", "flash_fwd"], layers, ONE) == ["nvjet", "flash_fwd"]


@pytest.mark.gpu
def test_the_kernels_of_a_step_are_found() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    runs = trace(lambda: torch.mm(x, x).add_(1))
    assert {len(run) for run in runs} == {2}
    shares = shares_of(runs, sites_of([span.name for span in runs[0]], 1, ONE))
    assert len(shares) == 2
    assert all(share.launches == 1 and share.added_us > 0 for share in shares)
