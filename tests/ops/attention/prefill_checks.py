"""How accurate prefill attention with 16-bit queries has to be."""

from __future__ import annotations

from collections.abc import Callable

import torch

Twin = Callable[[torch.dtype], tuple[torch.Tensor, torch.Tensor]]


def check(out: torch.Tensor, lse: torch.Tensor, twin: Twin, dtype: torch.dtype) -> None:
    """Demand at most twice torch's error in the same dtype, of all elements and of the worst.

    `twin` returns (out, lse) of the reference in the precision it is given.
    """
    exact, exact_lse = twin(torch.float64)
    torchs = (twin(dtype)[0].double() - exact).abs()
    error = (out.double() - exact).abs()
    assert error.square().mean().sqrt() <= 2 * torchs.square().mean().sqrt() + 1e-6
    assert error.amax() <= 2 * torchs.amax() + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
