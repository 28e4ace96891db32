"""What the real compiler makes of the probe kernel and of a few of the catalogue. No GPU needed.

All but a second or two of each test is nvcc. The rest of the catalogue is compiled by `python -m
ostinato build --all`, after which `kernels --budgets` holds it to its limits.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jit_probe import Probe
from test_jit_budgets import BUDGETS

from effort import effort, sampled
from ostinato import _C
from ostinato.jit.budgets import excesses, read_budgets
from ostinato.jit.compiler import build, plan
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.jit.sources import CSRC
from ostinato.jit.toolchain import require_cutlass, require_nvcc
from ostinato.jit.variant import Variant
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.attention.decode_variants import AttentionDecode
from ostinato.ops.attention.dequantize_kv import DequantizeKV
from ostinato.ops.attention.merge_states import MergeStates
from ostinato.ops.attention.prefill_variants import AttentionPrefill
from ostinato.ops.catalogue import CATALOGUE
from ostinato.ops.embed import Embed
from ostinato.ops.linear.fused_cuda import FusedLinear
from ostinato.ops.linear.gemm_variants import GemmSmallM, GemmTiled
from ostinato.ops.linear.quantize_cuda import Quantize
from ostinato.ops.sampling.sample_cuda import Sample

pytestmark = pytest.mark.nvcc

_PROBE_BUDGET = {"registers": 168, "stack": 0, "spills": 0, "smem": 0}


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", str(shared_cache))


def test_caches_may_be_where_shells_find_something_special(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "a, $HOME `b` 'c' \"d\""))
    (entry,) = build([plan(Probe())])
    assert entry.library.is_file()


def test_the_probe_is_within_its_budget_and_loads() -> None:
    (entry,) = build([plan(Probe())])
    assert excesses(entry.usage, _PROBE_BUDGET) == []
    assert entry.nvcc == require_nvcc().version
    # Loading needs neither a GPU nor a driver.
    assert isinstance(_C.Library(str(entry.library)), _C.Library)


def test_local_memory_exceeds_the_budget() -> None:
    (entry,) = build([plan(Probe(waste=64))])
    assert excesses(entry.usage, _PROBE_BUDGET) == ["stack: got 64, expected at most 0"]


@pytest.mark.timeout(900)  # compilers beside other tests
def test_kernels_are_within_their_budgets() -> None:
    """One of each family that leaves few registers free; a serialised wgmma is an excess, too.

    `make test-long` compiles these, `make test` three that take two seconds each.
    """
    fast: list[Variant] = [
        AttentionDecode(head_dim=128, dtype="bf16", columns=8, split_tokens=1024, cluster=4),
        next(kernel for kernel in CATALOGUE if isinstance(kernel, GemmSmallM)),
        MergeStates(dtype="bf16"),
    ]
    every: list[Variant] = [
        AppendKV(dtype="bf16", cache_dtype="e4m3"),
        AttentionDecode(head_dim=128, dtype="bf16", columns=8, split_tokens=1024, cluster=4),
        AttentionDecode(head_dim=256, dtype="fp16", kv_dtype="int8", columns=32, copy_pages=False),
        AttentionPrefill(head_dim=128, dtype="bf16"),
        AttentionPrefill(head_dim=64, dtype="fp16", keys="pages"),
        AttentionPrefill(head_dim=256, dtype="bf16", keys="slots"),
        *(AttentionPrefill(head_dim=d, dtype="e4m3", out_dtype="bf16") for d in (64, 128, 256)),
        Embed(dtype="bf16"),
        AttentionPrefill(head_dim=128, dtype="e4m3", out_dtype="bf16", warpgroups=3),
        DequantizeKV(dtype="bf16", kv_dtype="e4m3"),
        DequantizeKV(dtype="fp16", kv_dtype="int8"),
        MergeStates(dtype="bf16"),
        Quantize(kind="silu_mul", in_dtype="bf16", out_dtype="int8"),
        Quantize(kind="rms_norm", in_dtype="fp32", out_dtype="fp32"),
        Sample(dtype="fp32"),
        *[kernel for kernel in CATALOGUE if isinstance(kernel, (FusedLinear, GemmSmallM))][::4],
        GemmTiled(dtype="int8", out_dtype="bf16", channels=256, tokens=128),
        GemmTiled(dtype="int8", out_dtype="fp32", channels=128, tokens=128, pingpong=True),
        GemmTiled(dtype="e4m3", out_dtype="bf16", channels=128, tokens=128),
    ]
    variants = effort(fast, every)
    budgets = read_budgets(BUDGETS)
    entries = build([plan(variant) for variant in variants])
    for variant, entry in zip(variants, entries, strict=True):
        assert excesses(entry.usage, budgets[variant.name]) == [], variant.name


def test_only_the_debug_build_prints() -> None:
    release, debug = build([plan(Probe()), plan(Probe(), BuildMode(debug_print=True))])
    assert debug.mode == "debug-print"
    texts = [entry.library.read_bytes() for entry in (release, debug)]
    assert [b"vprintf" in text for text in texts] == [False, True]


@pytest.mark.parametrize("site", [None, "probe_load", "probe_store"])
def test_only_a_delay_build_sleeps(tmp_path: Path, site: str | None) -> None:
    item = plan(Probe(), BuildMode(delay_site=site))
    macros = [flag for flag in item.flags if flag.startswith("-D")]
    ptx = tmp_path / "probe.ptx"
    command = [require_nvcc().path, "-std=c++17", "-arch=compute_90a", *macros, f"-I{CSRC}"]
    subprocess.run([*command, "-ptx", Probe().source, "-o", ptx], check=True, timeout=120)
    assert ("nanosleep" in ptx.read_text()) == (site is not None)


def test_only_the_entry_points_are_exported() -> None:
    (entry,) = build([plan(Probe())])
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", entry.library], capture_output=True, text=True, check=True
    )
    assert {line.split()[-1] for line in listed.stdout.splitlines()} == {
        *("ostinato_fields", "ostinato_error_string"),
        *("ostinato_prepare", "ostinato_launch"),
    }


def _errors(source: Path, flags: Sequence[str]) -> str:
    """Return what nvcc says about a source that must not compile; code is never generated."""
    includes = [f"-I{folder}" for folder in (CSRC, require_cutlass().include)]
    command = [require_nvcc().path, *flags, *includes, "-cuda", source, "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        ("RegisterTable<4, false>::kSplit", "divided among two or three consumer warpgroups"),
        ("give_up_registers<36>()", "setmaxnreg takes multiples of 8 from 24 to 256"),
    ],
)
def test_impossible_registers_do_not_compile(tmp_path: Path, use: str, sentence: str) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(
        f'#include "common/registers.cuh"\n__global__ void kernel() {{ (void)ostinato::{use}; }}\n'
    )
    assert sentence in _errors(source, plan(Probe()).flags)


def test_asserts_do_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text('#include "common/check.h"\n')
    flags = [flag for flag in plan(Probe()).flags if flag != "-DNDEBUG"]
    assert "kernels are compiled with -DNDEBUG" in _errors(source, flags)


_SMALL = GemmSmallM(out_dtype="bf16", max_m=8)
_TILED = GemmTiled(dtype="int8", out_dtype="bf16", channels=128, tokens=256)


@pytest.mark.parametrize(
    ("variant", "sentence"),
    [
        (replace(_SMALL, token_warps=4), "every token warp needs whole tiles of 8 tokens"),
        (replace(_SMALL, row_tiles=32), "the epilogue gives each thread one weight row"),
        (replace(_TILED, pingpong=True), "sums must fit in the registers"),
    ],
)
def test_impossible_variants_do_not_compile(variant: Variant, sentence: str) -> None:
    assert sentence in _errors(variant.source, plan(variant, RELEASE).flags)


_DECODE = AttentionDecode(head_dim=128, dtype="bf16", columns=8)


@pytest.mark.parametrize(
    ("define", "sentence"),
    sampled(
        [
            ("OSTINATO_HEAD_DIM=24", "an MMA takes 16 of the head dim"),
            ("OSTINATO_COLUMNS=24", "an MMA takes 8 columns"),
            ("OSTINATO_COLUMNS=128", "four warps of 16 hold no more than 64"),
            ("OSTINATO_CLUSTER=16", "a cluster has at most 8 CTAs"),
            ("OSTINATO_CLUSTER=3", "divide 8 lines of an MMA"),
        ],
        5,
    ),
)
def test_impossible_decode_kernels_do_not_compile(define: str, sentence: str) -> None:
    name = define.partition("=")[0]
    flags = [f for f in plan(_DECODE).flags if not f.startswith(f"-D{name}=")]
    assert sentence in _errors(_DECODE.source, [*flags, f"-D{define}"])


_PREFILL = AttentionPrefill(head_dim=128, dtype="bf16")


@pytest.mark.parametrize(
    ("define", "sentence"),
    sampled(
        [
            ("OSTINATO_HEAD_DIM=24", "an MMA takes some of the head dim"),
            ("OSTINATO_KEYS=272", "an MMA takes some keys of values"),
            ("OSTINATO_KEYS=192", "one stage is loaded while another is multiplied"),
            ("OSTINATO_CONSUMERS=3", "scores, weights and outputs must fit in the registers"),
            ("OSTINATO_CONSUMERS=4", "two or three warpgroups multiply"),
        ],
        5,
    ),
)
def test_impossible_prefill_kernels_do_not_compile(define: str, sentence: str) -> None:
    name = define.partition("=")[0]
    flags = [f for f in plan(_PREFILL).flags if not f.startswith(f"-D{name}=")]
    assert sentence in _errors(_PREFILL.source, [*flags, f"-D{define}"])


_PREFILL_FP8 = AttentionPrefill(head_dim=128, dtype="e4m3", out_dtype="bf16", warpgroups=3)


@pytest.mark.parametrize(
    ("define", "sentence"),
    sampled(
        [
            ("OSTINATO_HEAD_DIM=80", "an MMA takes some of the head dim"),
            ("OSTINATO_KEYS=160", "8-bit values lie in rows of up to 128 keys"),
            ("OSTINATO_VALUE_DIM=96", "8-bit values are packed, of 64, 128 or 256 columns"),
            ("OSTINATO_SOURCE=Slots", "8-bit values are packed, of 64, 128 or 256 columns"),
            ("OSTINATO_KEYS=128", "scores, weights and outputs must fit in the registers"),
        ],
        5,
    ),
)
def test_impossible_fp8_prefill_kernels_do_not_compile(define: str, sentence: str) -> None:
    name = define.partition("=")[0]
    flags = [f for f in plan(_PREFILL_FP8).flags if not f.startswith(f"-D{name}=")]
    assert sentence in _errors(_PREFILL_FP8.source, [*flags, f"-D{define}"])


def test_keys_are_no_values(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#include "attention/decode/shared_storage.cuh"\n'
        "using namespace ostinato::decode;\n"
        "__global__ void kernel(SharedStorage& shared) { Blocks<Values>& v = shared.keys; }\n"
    )
    assert "cannot be initialized" in _errors(source, plan(_DECODE).flags)
