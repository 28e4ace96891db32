"""Products on the CPU: operands that are widened, and results in another dtype."""

from __future__ import annotations

import pytest
import torch
from ops_cases import E4M3, assert_close, assert_same_bits, quantized_randn

from ostinato.ops.linear import cpu_product
from ostinato.ops.linear.cpu_product import float_product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_widened_in_parts_is_widened_at_once(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = (
        quantized_randn((n, 48), E4M3) if dtype is E4M3 else torch.randn(n, 48).to(dtype)
        for n in (rows, 300)
    )
    bias = torch.randn(300)
    parts, once = (torch.empty(rows, 300) for _ in range(2))
    monkeypatch.setattr(cpu_product, "_WIDENED", 64 * 48)
    float_product(x, w, bias, parts)
    monkeypatch.undo()
    float_product(x.float(), w.float(), bias, once)
    assert_close(parts, lambda to: x.to(to) @ w.to(to).t() + bias.to(to))
    assert_same_bits(parts, once)


def test_fp32_logits_of_a_16_bit_head_are_not_rounded() -> None:
    x, w = torch.randn(3, 576).bfloat16(), torch.randn(700, 576).bfloat16()
    logits = torch.empty(3, 700)
    float_product(x, w, None, logits)
    assert_close(logits, lambda to: x.to(to) @ w.to(to).t())
    assert not logits.equal(logits.bfloat16().float())
