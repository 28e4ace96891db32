"""What each kernel adds to a step: sums to the step, whatever overlaps."""

from __future__ import annotations

import pytest
import torch

from ostinato.bench.breakdown import kernel_shares, shares_of


def test_what_overlaps_is_counted_once() -> None:
    spans = [
        (10.0, 14.0, "void ostinato::gemm<8, true>(Params)"),
        (11.0, 16.0, "void ostinato::(anonymous namespace)::norm<8>(Params)"),
        (15.5, 20.0, "void ostinato::gemm<8, false>(Params)"),
        (12.0, 13.0, "Memcpy DtoD (Device -> Device)"),
    ]
    shares = {share.name: share for share in shares_of(reversed(spans))}
    assert {name: share.added_us for name, share in shares.items()} == {
        "gemm": 1.0 + 4.0,
        "norm": 2.0,
        "Memcpy DtoD ": 1.0,
    }
    assert shares["gemm"].launches == 2
    assert shares["gemm"].running_us == 8.5
    assert sum(share.added_us for share in shares.values()) == 20.0 - 12.0


def test_nothing_gives_no_shares() -> None:
    assert shares_of([]) == []


@pytest.mark.gpu
def test_the_kernels_of_a_step_are_found() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    shares = kernel_shares(lambda: torch.mm(x, x).add_(1))
    assert len(shares) == 2
    assert all(share.launches == 1 and share.added_us > 0 for share in shares)
