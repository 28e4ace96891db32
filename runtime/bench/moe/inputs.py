"""Random blocks of experts and tokens, in as many sets as it takes to keep the L2 cold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...checkpoint.weights import quantize_weight, quantize_weight_blocks
from ...models.experts.config import ExpertsConfig
from ...models.experts.mixture import Mixture
from ...models.experts.products import BlockFP8Experts, DenseExperts, Experts, W8A8Experts
from ...models.layers import DenseLinear
from ..harness.rotation import num_sets
from ..weights import dtype_named, expert_scales
from .cases import Case, Shape, choices

_BLOCKS = "fp8-block"
# Of the logits of chosen experts, best first, and of all others.
_FIRST, _STEP, _OTHERS = 2.0, 0.0625, -2.0


@dataclass(frozen=True)
class Weights:
    """The weights of all experts, as ours and as peers take them.

    Args:
        mixture: ours, with a router whose logits are the first elements of a token.
        router: [E, H] bf16, of that router.
        gate_up, down: [E, 2I, H] and [E, H, I] of the precision.
        gate_up_scale, down_scale: fp32 [E, rows], by blocks [E, ceil(rows / 128), ceil(K / 128)];
            None in bf16.
    """

    mixture: Mixture
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None


@dataclass(frozen=True)
class Inputs:
    """Tensors of one launch: x [M, H] bf16, normalised; `out` [M, H] is what a peer may write."""

    x: torch.Tensor
    weights: Weights
    config: ExpertsConfig
    ids: torch.Tensor
    out: torch.Tensor


def random_inputs(
    case: Case, precision: str, device: torch.device, weights: Sequence[Weights] = ()
) -> Sequence[Inputs]:
    """Return sets of inputs of one block, in each of which other experts are chosen.

    Args:
        case: the block and its tokens.
        precision: of the weights: "int8", "fp8", "fp8-block" or "bf16".
        device: where they lie.
        weights: of this shape and precision, which the sets take in turn; by default made here.
    """
    shape = case.shape
    width = 2 if precision == "bf16" else 1
    read = case.distinct * shape.expert_weights * width
    every = shape.experts * shape.expert_weights * width
    weights = weights or [
        random_weights(shape, precision, device) for _ in range(min(2, num_sets(every, device)))
    ]
    config = ExpertsConfig(shape.experts, shape.top_k, shape.intermediate, (True,))
    generator = torch.Generator().manual_seed(1)
    # Sets in sequence read the weights of other experts, where not all are read.
    step = case.distinct % shape.experts or 1
    order = torch.randperm(shape.experts, generator=generator)
    found = []
    for index in range(num_sets(read, device)):
        ids = order.roll(index * step)[choices(case)].to(device)
        x = torch.randn(case.m, shape.hidden, dtype=torch.bfloat16, device=device)
        logits = torch.full((case.m, shape.experts), _OTHERS, dtype=x.dtype, device=device)
        steps = _FIRST - _STEP * torch.arange(shape.top_k, device=device).to(x.dtype)
        x[:, : shape.experts] = logits.scatter_(1, ids, steps.expand_as(ids).contiguous())
        found.append(Inputs(x, weights[index % len(weights)], config, ids, torch.empty_like(x)))
    return found


def random_weights(shape: Shape, precision: str, device: torch.device) -> Weights:
    """Return random weights that keep numbers of order one."""
    router = torch.eye(shape.experts, shape.hidden, dtype=torch.bfloat16, device=device)
    gate_up, gate_up_scale, first = _stored(
        shape.experts, 2 * shape.intermediate, shape.hidden, precision, device, gated=True
    )
    down, down_scale, second = _stored(
        shape.experts, shape.hidden, shape.intermediate, precision, device, gated=False
    )
    mixture = Mixture(DenseLinear(router, out_dtype=torch.float32), first, second)
    return Weights(mixture, router, gate_up, down, gate_up_scale, down_scale)


def _stored(
    experts: int, rows: int, columns: int, precision: str, device: torch.device, *, gated: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Experts]:
    """Return weights [experts, rows, columns], their scales, and ours of them."""
    shape, out = (experts, rows, columns), torch.bfloat16
    plain = torch.empty(shape, dtype=out, device=device).normal_(std=columns**-0.5)
    if precision == "bf16":
        return plain, None, DenseExperts(plain, gated)
    if precision == _BLOCKS:
        pairs = [quantize_weight_blocks(weight, torch.float32) for weight in plain]
        codes = torch.stack([values for values, _ in pairs])
        blocks = torch.stack([scale for _, scale in pairs])
        scales = torch.stack([expert_scales(own, rows, gated=gated) for own in blocks])
        return codes, blocks, BlockFP8Experts(codes, gated, scales, out)
    codes, scale = quantize_weight(plain.flatten(0, 1), dtype_named(precision), torch.float32)
    of_rows = scale.view(experts, rows)
    codes = codes.view(shape)
    return codes, of_rows, W8A8Experts(codes, gated, of_rows, out)
