"""Products with block scales: inputs, the check, and who is compared with whom."""

from __future__ import annotations

import pytest
import torch

from ostinato.bench.gemm.benchmark import BENCHMARK, is_rival, num_bytes
from ostinato.bench.gemm.cases import BLOCK_SHAPE_GROUPS, Case, Shape, parse_shapes
from ostinato.bench.gemm.check import difference, product
from ostinato.bench.gemm.impls import ours
from ostinato.bench.gemm.inputs import Inputs, Layout, random_inputs, random_weights
from ostinato.bench.harness.runner import time_cases
from ostinato.ops import reference
from ostinato.ops.linear.gemm_variants import BLOCK_E4M3

CPU = torch.device("cpu")
CASE = Case(Shape(200, 300), 5)


@pytest.fixture
def inputs() -> Inputs:
    return random_inputs(CASE, random_weights(CASE.shape, [BLOCK_E4M3], CPU))[BLOCK_E4M3][0]


def test_the_product_is_scaled_by_blocks(inputs: Inputs) -> None:
    x, weight = inputs.x, inputs.weight
    assert weight.blocks is not None
    assert weight.blocks.shape == (2, 3)
    assert inputs.x_scale.shape == (3, 5)
    expected = reference.fp8_block_linear(
        x, weight.plain, inputs.x_scale, weight.scale, dtype=torch.float64
    )
    torch.testing.assert_close(product(inputs).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_rounded_result_is_right_and_a_changed_element_is_not(inputs: Inputs) -> None:
    got = product(inputs).bfloat16()
    assert difference(got, product(inputs), inputs) is None
    got[3, 150] += 0.1 * product(inputs).square().mean().sqrt()
    assert "element [3, 150]" in str(difference(got, product(inputs), inputs))


def test_ours_is_right_and_has_rows() -> None:
    impl = ours("fp8-block", with_pdl=True)
    (result,) = time_cases(BENCHMARK, [CASE], [impl], CPU)
    assert not result.failures
    assert [row.impl for row in result.rows] == ["ostinato_fp8_block"]


def test_bytes_of_scales_are_those_of_blocks() -> None:
    layout = Layout(BLOCK_E4M3)
    operands = 5 * 300 + 200 * 300 + 2 * 5 * 200
    assert num_bytes(CASE, layout) == operands + 4 * 3 * (5 + 2)


def test_only_blocks_are_compared_with_blocks() -> None:
    for name in ("dg_blk", "tri_blk", "smm_blk"):
        assert is_rival("ostinato_fp8_block", name)
        assert not is_rival("ostinato_fp8", name)
    assert not is_rival("ostinato_fp8_block", "smm_row")
    assert not is_rival("ostinato_fp8_block", "ostinato_fp8")


def test_groups_of_shapes_can_be_named() -> None:
    found = parse_shapes(list(BLOCK_SHAPE_GROUPS))
    assert Shape(2112, 7168) in found
    assert Shape(34816, 5120) in found
    assert len(found) == 9
