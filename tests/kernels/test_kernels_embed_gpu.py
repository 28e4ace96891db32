"""The embedding on a GPU: what a late predecessor writes is what counts, here and behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ostinato import ops
from ostinato.jit import compiler
from ostinato.ops.embed import Embed
from ostinato.ops.linear.quantize_cuda import Quantize

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

VOCABULARY, SETS = 400, 40


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    quantize = Quantize(kind="per_token", in_dtype="bf16", out_dtype="int8")
    compiler.build([compiler.plan(variant) for variant in (Embed(dtype="bf16"), quantize)])


@pytest.mark.parametrize(("count", "dim"), [(1, 4096), (32, 4096), (32, 61), (9, 20000)])
def test_a_predecessor_may_be_late(
    count: int, dim: int, write_late: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    table = torch.randn(VOCABULARY, dim, device="cuda").bfloat16()
    for real in (count, (count + 1) // 2):
        # Tokens, rows of `seen`, and how many of both are real, in one buffer.
        numbers = torch.zeros(2 * count + 1, dtype=torch.int64, device="cuda")
        tokens, rows = numbers[:count], numbers[count:-1]
        n_active = numbers[-1:].view(torch.int32)[:1]
        right = torch.cat(
            [
                torch.randint(VOCABULARY, (count,)),
                torch.randint(SETS, (count,)),
                torch.tensor([real]),
            ]
        ).cuda()
        for wrong in (0, 1, -1):
            numbers.fill_(wrong)
            seen = torch.zeros(SETS, VOCABULARY, dtype=torch.bool, device="cuda")
            out = torch.full((count, dim), torch.nan, dtype=torch.bfloat16, device="cuda")
            codes = torch.full((count, dim), 99, dtype=torch.int8, device="cuda")
            torch.cuda.synchronize()  # or the predecessor's own start would wait for these
            write_late(numbers.view(torch.int32), right.view(torch.int32))
            ops.embed(tokens, table, seen=seen, seen_rows=rows, n_active=n_active, out=out)
            # It asks how many rows are real before it waits for the embedding.
            ops.quantize_per_token(out, torch.int8, n_active=n_active, out=codes)
            assert torch.equal(tokens, right[:count])
            assert torch.equal(out[:real], table[tokens[:real]])
            assert out[real:].isnan().all()
            marks = torch.zeros_like(seen)
            marks[rows[:real], tokens[:real]] = True
            assert torch.equal(seen, marks)
            expected, _ = ops.quantize_per_token(table[tokens[:real]], torch.int8)
            assert torch.equal(codes[:real], expected)
            assert (codes[real:] == 99).all()
