"""Which op runs on what, by compute capability, and products by torch where no kernel runs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from ops_cases import E4M3, assert_same_bits, quantized_randn
from ops_kernels import ROW_KERNELS
from page_blocks import code_blocks

from effort import effort
from ostinato.jit import targets
from ostinato.jit.budgets import parse_ptxas
from ostinato.jit.compiler import plan
from ostinato.jit.sources import CSRC
from ostinato.jit.targets import CLUSTERS, FP8, TARGETS, Capability, Target, target_named, target_of
from ostinato.jit.toolchain import require_nvcc
from ostinato.jit.variant import Variant
from ostinato.ops.catalogue import CATALOGUE
from ostinato.ops.implementations import implementations
from ostinato.ops.linear.w8a8_torch import fp8_product, int8_product

HOPPER = (9, 0)
ROW_FAMILIES = {type(variant) for variant in ROW_KERNELS}
FAMILIES = sorted({type(variant) for variant in CATALOGUE}, key=lambda family: family.family)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.family)
def test_families_support_hopper_and_row_kernels_every_gpu(family: type[Variant]) -> None:
    capabilities = [*(target.capability for target in TARGETS), (12, 1), (8, 8)]
    supported = {capability for capability in capabilities if family.supports(capability)}
    assert supported == (set(capabilities) if family in ROW_FAMILIES else {HOPPER})
    assert not family.supports((7, 5))


def test_a_family_is_compiled_for_no_gpu_that_it_does_not_support() -> None:
    for variant in (next(v for v in CATALOGUE if type(v) is family) for family in FAMILIES):
        for target in TARGETS:
            if variant.supports(target.capability):
                assert target.gencode in plan(variant, target=target).flags
            else:
                with pytest.raises(ValueError, match=f"^target: got {target}, expected one"):
                    plan(variant, target=target)


def test_every_target_has_libraries_of_its_own() -> None:
    variant = ROW_KERNELS[0]
    plans = [plan(variant, target=target) for target in (*TARGETS, target_named("compute_80"))]
    assert len({item.key for item in plans}) == len(plans)
    assert plan(variant).key == plan(variant, target=target_named("90a")).key


def test_a_new_gpu_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how-to/add-an-architecture.md, followed."""
    (rows,) = code_blocks("docs/how-to/add-an-architecture.md")
    names: dict[str, Any] = {"TARGETS": TARGETS, "Target": Target, "FP8": FP8, "CLUSTERS": CLUSTERS}
    exec(rows, names)
    *_, added = names["TARGETS"]
    assert added.name == "121"
    assert str(target_of((12, 1))) == "sm_120"
    monkeypatch.setattr(targets, "TARGETS", (*TARGETS, added))
    assert target_of((12, 1)) is target_named("121")
    assert target_of((12, 0)) == target_named("120")
    for family in FAMILIES:
        assert family.supports((12, 1)) == (family in ROW_FAMILIES)
    for variant in ROW_KERNELS:
        assert "arch=compute_121,code=sm_121" in plan(variant, target=added).flags
    assert implementations((12, 1), added)["sample"] == "kernel (sm_121)"
    assert implementations((12, 1), added)["w8a8_linear, fp8"] == "torch (_scaled_mm)"


@pytest.mark.parametrize(
    ("capability", "kernels", "int8", "fp8"),
    [
        ((7, 5), 0, "torch (_int_mm)", "torch (e4m3 dequantised to fp16)"),
        ((8, 0), 11, "torch (_int_mm)", "torch (e4m3 dequantised to fp16)"),
        ((8, 6), 11, "torch (_int_mm)", "torch (e4m3 dequantised to fp16)"),
        ((8, 9), 11, "torch (_int_mm)", "torch (_scaled_mm)"),
        (HOPPER, 22, "kernel (sm_90a)", "kernel (sm_90a)"),
        ((10, 0), 11, "torch (_int_mm)", "torch (_scaled_mm)"),
        ((12, 1), 11, "torch (_int_mm)", "torch (_scaled_mm)"),
    ],
)
def test_what_ops_run_on(capability: Capability, kernels: int, int8: str, fp8: str) -> None:
    target = target_of(capability)
    found = implementations(capability, target)
    assert list(found.values()).count(f"kernel ({target})") == kernels
    assert found["w8a8_linear, int8"] == int8
    assert found["w8a8_linear, fp8"] == fp8
    if kernels:
        assert found["sample"] == f"kernel ({target})"
    assert found["linear, 16 bits"] == (int8 if capability == HOPPER else "torch (mm)")
    assert found["linear, fp32"] == "torch (mm)"


_SIZES = [(1, 1, 1), (3, 17, 15), (17, 8, 16), (33, 100, 272), (70, 9, 129), (200, 136, 1000)]


@pytest.mark.parametrize(("m", "n", "k"), _SIZES)
def test_int8_products_are_exact(m: int, n: int, k: int, device: torch.device) -> None:
    x, w = (torch.randint(-128, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
    x[0], w[0] = -128, -128
    exact = (x.long() @ w.long().t()).int()
    assert torch.equal(int8_product(x.to(device), w.to(device)).cpu(), exact)


_FP8_WAYS = [((8, 0), True), (HOPPER, False), (HOPPER, True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("capability", "fast"), _FP8_WAYS)
@pytest.mark.parametrize(("m", "n", "k"), _SIZES)
def test_fp8_products(m: int, n: int, k: int, capability: Capability, fast: bool) -> None:
    x, w = (quantized_randn((rows, k), E4M3).cuda() for rows in (m, n))
    acc = fp8_product(x, w, fast, capability)
    assert acc.dtype is torch.float32
    exact = x.double() @ w.double().t()
    magnitude = x.double().abs() @ w.double().abs().t()
    # Tensor cores cut FP8 sums to 13 fraction bits: fast, after each 32 products of a whole row,
    # else of a part of it. Sums of others are fp32.
    bound = 2.0**-16 if capability != HOPPER else 2.0**-13 * (max(k // 32, 2) if fast else 2)
    assert ((acc.double() - exact).abs() <= bound * (1 + k // 1024) * magnitude).all()
    for first, count in ((0, 1), (m // 2, m - m // 2)):
        part = fp8_product(x[first : first + count], w, fast, capability)
        assert_same_bits(part, acc[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize(("capability", "fast"), _FP8_WAYS)
def test_products_by_torch_are_captured(capability: Capability, fast: bool) -> None:
    x8, w8 = (torch.randint(-128, 128, (rows, 200), dtype=torch.int8).cuda() for rows in (5, 33))
    x, w = (quantized_randn((rows, 200), E4M3).cuda() for rows in (5, 33))
    out = [torch.empty(5, 33, dtype=kind, device="cuda") for kind in (torch.int32, torch.float32)]

    def step() -> None:
        out[0].copy_(int8_product(x8, w8))
        out[1].copy_(fp8_product(x, w, fast, capability))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        x8.random_(-128, 128)
        x.copy_(quantized_randn((5, 200), E4M3))
        graph.replay()
        expected = int8_product(x8, w8), fp8_product(x, w, fast, capability)
        for got, exact in zip(out, expected, strict=True):
            assert_same_bits(got, exact)


def _sample_of_row_kernels() -> Sequence[Variant]:
    """Return one variant of each family: of quantisation that which needs most."""
    names = ("embed-bf16", "merge_states-bf16", "sample-fp32", "append_kv-bf16-e4m3")
    return [v for v in ROW_KERNELS if v.name in (*names, "quantize-silu_mul-bf16-e4m3")]


# Of all GPUs sm_80 lacks most, so that its kernels take other ways. Each other GPU has its turn.
# Two thirds of them are quantisation's, which differ by a dtype or a kind of scale: of neighbours
# that are alike few are compiled: their source is one, and CI has half an hour.
_SM_80 = target_named("80")
_OTHERS = cycle(target_named(name) for name in ("86", "89", "90a", "100", "120"))
_QUANTIZE = [variant for variant in ROW_KERNELS if variant.family == "quantize"]
_REST = [variant for variant in ROW_KERNELS if variant.family != "quantize"]
_COMPILED = effort(
    [(_SM_80, variant) for variant in _sample_of_row_kernels()[:2]],
    [
        *((_SM_80, variant) for variant in (*_REST[::2], *_QUANTIZE[::6])),
        *((next(_OTHERS), variant) for variant in ROW_KERNELS[::10]),
    ],
)


@pytest.mark.nvcc
@pytest.mark.parametrize(("target", "variant"), _COMPILED, ids=lambda x: getattr(x, "name", None))
def test_row_kernels_compile_without_local_memory(target: object, variant: Variant) -> None:
    item = plan(variant, target=target)  # type: ignore[arg-type]
    flags = [flag for flag in item.flags if flag != "-shared"]
    command = [str(require_nvcc().path), *flags, f"-I{CSRC}", "-cubin", str(variant.source)]
    done = subprocess.run(
        [*command, "-o", "/dev/null"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    usage = parse_ptxas(done.stderr + done.stdout)
    assert (usage.stack, usage.spills) == (0, 0)
    assert usage.smem <= 48 * 1024
