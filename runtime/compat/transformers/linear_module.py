"""A module of transformers' models whose product runs on our 8-bit kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...models.layers import Linear


class QuantizedLinear(torch.nn.Module):
    """y = x·Wᵀ + b by a layer of a checkpoint, in the place of an `nn.Linear`.

    The weight may lie in the order in which kernels read it, and stays where it is: the module has
    no `weight`, cannot be moved or converted, and has no state dict.

    Args:
        layer: of 8-bit weights.
        dtype: of results.
        factors: [in_features] fp32, what each column of x is multiplied by first; None for ones.
    """

    def __init__(
        self, layer: Linear, dtype: torch.dtype, factors: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.dtype = dtype
        self.factors = None if factors is None else factors.to(dtype)
        self.out_features, self.in_features = layer.shape
        tensors = [*layer.tensors(), *([] if self.factors is None else [self.factors])]
        for index, tensor in enumerate(tensors):
            # Graphs of torch.compile copy each input, but for those with an address that stays.
            torch._dynamo.mark_static_address(tensor)
            # Found by whoever looks for the memory of a model, such as GraphRunner.
            self.register_buffer(f"tensor_{index}", tensor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features] of the module's dtype.

        Raises:
            ValueError: when x requires a gradient, while gradients are enabled.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                "x: got a tensor that requires a gradient, expected none: there is no backward "
                "pass (torch.no_grad() says that none is wanted)"
            )
        if self.factors is not None:
            x = x * self.factors
        rows = x.reshape(-1, x.size(-1))
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return self.layer(rows).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return what a printed model shows."""
        layer = type(self.layer).__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, layer={layer}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Refuse what would move or convert the module: kernels were chosen for where it is."""
        held = self.get_buffer("tensor_0")
        probe = torch.empty(0, dtype=self.dtype, device=held.device)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype is not probe.dtype:
            raise RuntimeError(
                f"model: got a move to {moved.dtype} on {moved.device} after replace_linears, "
                f"expected {probe.dtype} on {probe.device}: move the model before"
            )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise RuntimeError(
            f"{prefix.removesuffix('.')}: got a state dict asked for after replace_linears, "
            "expected before: 8-bit weights are kept in the order of kernels"
        )
