"""A mixture of experts in place of a decoder layer's MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ... import ops
from ...ops.collective.communicator import Communicator
from ...ops.collective.partial_sum import PartialSum
from ..kinds import InputKind
from ..layers import Layer, Linear
from ..norms import Addend
from .config import ExpertsConfig
from .products import Experts


@dataclass
class Mixture:
    """A router, the experts it chooses from, and what all tokens go to besides.

    Of several ranks each has a part of every expert and of the shared one: what it returns is a
    part of a sum. All of them have the whole router, and choose alike.

    `router` has a logit in fp32 for each expert; `correction` [experts] fp32 is added to scores for
    the choice. `shared_gate` has one logit, of the weight of the shared expert's results. What a
    family does not have is None.
    """

    router: Linear
    gate_up: Experts
    down: Experts
    correction: torch.Tensor | None = None
    shared_gate_up: Linear | None = None
    shared_down: Layer | None = None
    shared_gate: Linear | None = None
    communicator: Communicator | None = None

    def __call__(
        self, x: torch.Tensor, config: ExpertsConfig, n_active: torch.Tensor | None = None
    ) -> Addend:
        """Map x [T, hidden_size], normalised, to the sum of what its experts make of each token.

        A token whose logits are not numbers gets NaN, and changes no other's results.

        Args:
            x: of the model's dtype.
            config: how tokens choose their experts.
            n_active: int32 [1] on the device, how many tokens are real; the others go to no expert.
        """
        plan = ops.moe_route(
            self.router(x, n_active),
            config.top_k,
            scoring=config.scoring,
            renormalize=config.normalized,
            routed_scale=config.scale,
            correction_bias=self.correction,
            groups=config.num_groups,
            top_groups=config.top_groups,
            group_score="top2",
            n_active=n_active,
        )
        y = self.down(self.gate_up(x, plan, n_active), plan, n_active)
        shared = gate = None
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate_up = self.shared_gate_up(x, n_active)
            made = self.shared_down.after_activation(gate_up, "silu_mul", n_active)
            # A rank's part of it is added up with that of the experts.
            shared = made.values if isinstance(made, PartialSum) else made
        if self.shared_gate is not None:
            gate = self.shared_gate(x, n_active)
        total = ops.moe_combine(y, plan, shared=shared, shared_gate=gate).total
        return total if self.communicator is None else PartialSum(total, self.communicator)

    def linears(self) -> Iterator[tuple[str, InputKind, Layer]]:
        """Yield the layers that all tokens go through, and what comes before each."""
        yield "router", "per_token", self.router
        if self.shared_gate_up is not None and self.shared_down is not None:
            yield "shared_gate_up", "per_token", self.shared_gate_up
            yield "shared_down", "silu_mul", self.shared_down
        if self.shared_gate is not None:
            yield "shared_gate", "per_token", self.shared_gate

    def experts(self) -> Iterator[tuple[str, Experts]]:
        """Yield the grouped products."""
        yield "experts_gate_up", self.gate_up
        yield "experts_down", self.down
