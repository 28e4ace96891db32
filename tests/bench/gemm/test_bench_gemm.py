"""Results are checked before they are timed, and a case has a row for every right one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_adapters import ADAPTERS

from ostinato.bench.gemm.benchmark import BENCHMARK, num_bytes
from ostinato.bench.gemm.cases import Case, Shape
from ostinato.bench.gemm.check import difference, product
from ostinato.bench.gemm.impls import PEERS, ours
from ostinato.bench.gemm.inputs import Inputs, Layout, random_inputs, random_weights
from ostinato.bench.harness.benchmark import Implementation, each
from ostinato.bench.harness.peers import adapter_folder, find_peers, select
from ostinato.bench.harness.runner import time_cases

CPU = torch.device("cpu")
CASE = Case(Shape(24, 160), 5)


def peers(names: Sequence[str], **environ: str) -> list[Implementation]:
    return select(names, find_peers(BENCHMARK, adapter_folder(ADAPTERS, {}), environ))


def inputs(operand: str, case: Case = CASE) -> Inputs:
    return random_inputs(case, random_weights(case.shape, [operand], CPU))[operand][0]


def exact(one: Inputs) -> torch.Tensor:
    return one.x_scale.unsqueeze(1) * one.weight.scale * product(one)


@pytest.mark.parametrize("operand", ["int8", "e4m3", "bf16"])
def test_a_rounded_result_is_right_and_a_changed_element_is_not(operand: str) -> None:
    one = inputs(operand)
    got = exact(one).to(torch.bfloat16)
    assert difference(got, product(one), one) is None
    got[3, 20] += 0.5 * exact(one).square().mean().sqrt()
    found = difference(got, product(one), one)
    assert found is not None
    assert found.startswith(f"element [3, 20] is {got[3, 20].item():g}, expected ")


def test_the_bound_holds_for_small_scales_as_for_large_ones() -> None:
    one = inputs("e4m3")
    one.x_scale[:] = torch.tensor([1e-6, 1.0, 1e-3, 1.0, 1.0])
    got = exact(one).to(torch.bfloat16)
    assert difference(got, product(one), one) is None
    got[0] *= 1.5
    assert "element [0, " in str(difference(got, product(one), one))


@pytest.mark.parametrize("operand", ["int8", "e4m3"])
def test_nan_and_missing_scales_are_wrong(operand: str) -> None:
    one = inputs(operand)
    got = exact(one).to(torch.bfloat16)
    assert difference(product(one), product(one), one) is not None
    assert difference(product(one), product(one), one, scaled=False) is None
    got[4, 0] = torch.nan
    assert "element [4, 0] is nan" in str(difference(got, product(one), one))
    assert difference(got[:4], product(one), one) == "got shape [4, 24], expected [5, 24]"


def test_all_operands_hold_the_same_codes() -> None:
    sets = random_inputs(CASE, random_weights(CASE.shape, ["int8", "e4m3", "bf16"], CPU))
    for int8, e4m3, bf16 in zip(*sets.values(), strict=True):
        assert int8.x_scale is e4m3.x_scale is bf16.x_scale
        assert torch.equal((int8.x.bfloat16() * 0.02).to(torch.float8_e4m3fn), e4m3.x)
        assert torch.equal(int8.weight.plain.bfloat16() * 0.08, bf16.weight.plain)
        for one in (e4m3, bf16):
            assert torch.equal(one.weight.packed.unpack().float(), one.weight.plain.float())
    assert not torch.equal(sets["int8"][0].x, sets["int8"][1].x)


def test_rows_come_in_the_order_of_implementations() -> None:
    impls = [ours("int8", with_pdl=True), ours("fp8", with_pdl=False), ours("bf16", with_pdl=True)]
    impls += peers(["bf16", "smm_row"])
    few, many = time_cases(BENCHMARK, [CASE, replace(CASE, m=17)], impls, CPU)
    assert [row.impl for row in few.rows] == [impl.name for impl in impls]
    assert [row.impl for row in many.rows] == [impl.name for impl in impls]
    assert {row.case for row in many.rows} == {"N24 K160 M17"}
    assert few.failures == many.failures == few.unsupported == {}


def test_wrong_and_failing_ones_have_a_reason_and_no_row() -> None:
    def fail(one: Inputs) -> torch.Tensor:
        raise RuntimeError("needs K % 256 == 0\nand says more")

    impls = [
        Implementation("wrong", Layout("int8"), each(lambda one: torch.zeros_like(one.out))),
        Implementation("picky", Layout("int8"), each(fail)),
        Implementation("ostinato_int8", Layout("int8"), each(fail)),
    ]
    [result] = time_cases(BENCHMARK, [CASE], impls, CPU)
    assert result.rows == []
    assert result.unsupported == {"picky": "needs K % 256 == 0"}
    assert result.failures["wrong"].startswith("wrong result: element [")
    assert result.failures["ostinato_int8"] == "needs K % 256 == 0"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgl_i8", 5 * 160 + 24 * 160 + 2 * 5 * 24 + 4 * (5 + 24)),
        ("int_mm", 5 * 160 + 24 * 160 + 4 * 5 * 24),
        ("bf16", 2 * (5 * 160 + 24 * 160 + 5 * 24)),
    ],
)
def test_the_bytes_of_a_case(name: str, expected: int) -> None:
    [peer] = peers([name])
    assert num_bytes(CASE, peer.layout) == expected


def test_unknown_and_missing_peers(tmp_path: Path) -> None:
    assert [peer.name for peer in peers(list(PEERS))] == list(PEERS)
    with pytest.raises(ValueError, match="got 'vllm', expected all or none or sgl_i8 or"):
        peers(["vllm"])
    for peer in peers(["sgl_i8", "sgl_f8"], OSTINATO_SGL_LIBRARY=str(tmp_path / "missing.so")):
        with pytest.raises(FileNotFoundError, match=r"missing\.so: no such file"):
            peer.prepare()


def test_int_mm_refuses_few_tokens_and_says_so() -> None:
    [result] = time_cases(BENCHMARK, [CASE], peers(["int_mm"]), CPU)
    assert result.rows == []
    assert result.unsupported == {"int_mm": "got 5 tokens, expected more than 16"}
