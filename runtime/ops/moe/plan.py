"""Which rows go to which expert: the result of routing, all of it on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..common import checks
from ..common.sizes import ceil_div

TILE_TOKENS = (8, 16, 32, 64, 128)  # rows of a token tile
TILE_FIELDS = 4  # int32 of an entry of `tiles`: four make one load


class MoePlan(NamedTuple):
    """The experts of each token, and the rows of each expert.

    Token t of T has top_k slots, of which slot t·top_k + j is its j-th best expert. A row is a slot
    that has an expert: rows are sorted by expert, then by token. Tokens of padding, and those whose
    logits are not numbers, have no rows.

    Args:
        ids: int32 [T, top_k], the experts of a token, best first; -1 for none.
        weights: fp32 [T, top_k], what their outputs are multiplied by; without an expert 0 for
            padding, NaN for a token whose logits are not numbers.
        rows: int32 [T·top_k], the slot of each row, and behind the last row the slots without one.
        offsets: int32 [experts + 1], the first row of each expert, and last the number of rows.
        tiles: int32 [capacity, 4], runs of at most `tile_tokens` rows of one expert, as (expert,
            first row, row behind the last, 0), sorted; undefined beyond the last tile.
        n_tiles: int32 [1], how many tiles there are.
        tile_tokens: one of `TILE_TOKENS`, chosen from T·top_k and the number of experts.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    n_tiles: torch.Tensor
    tile_tokens: int

    @property
    def tokens(self) -> int:
        """T, the tokens that were routed, padding included."""
        return self.ids.size(0)

    @property
    def top_k(self) -> int:
        """Slots of a token."""
        return self.ids.size(1)

    @property
    def experts(self) -> int:
        """Experts that could be chosen."""
        return self.offsets.size(0) - 1

    @property
    def n_rows(self) -> torch.Tensor:
        """Int32 [1], how many rows there are: `n_active` of ops on the rows of experts."""
        return self.offsets[-1:]


def tile_tokens_for(slots: int, experts: int) -> int:
    """Return how many rows a token tile has, so that most experts need one tile.

    Args:
        slots: T·top_k, the most rows there can be.
        experts: among which they are divided.
    """
    # Twice the average: few experts of a balanced routing get more. Half-empty tiles cost little,
    # since few tokens wait for weights, but a second tile reads the weights again.
    wanted = ceil_div(2 * slots, experts)
    return next((tile for tile in TILE_TOKENS if tile >= wanted), TILE_TOKENS[-1])


def most_tiles(slots: int, experts: int, tile_tokens: int) -> int:
    """Return how many token tiles `slots` rows make at most, however they are divided."""
    return min(slots, min(experts, slots) + slots // tile_tokens)


def balanced_tiles(slots: int, experts: int, tile_tokens: int) -> int:
    """Return how many token tiles `slots` rows make if each expert has as many."""
    chosen = min(experts, slots)
    return chosen * ceil_div(slots, max(1, chosen) * tile_tokens)


def empty_plan(tokens: int, top_k: int, experts: int, device: torch.device) -> MoePlan:
    """Return memory for the plan of these tokens."""
    slots = tokens * top_k
    tile_tokens = tile_tokens_for(slots, experts)

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return MoePlan(
        ids=int32(tokens, top_k),
        weights=torch.empty(tokens, top_k, dtype=torch.float32, device=device),
        rows=int32(slots),
        offsets=int32(experts + 1),
        tiles=int32(most_tiles(slots, experts, tile_tokens), TILE_FIELDS),
        n_tiles=int32(1),
        tile_tokens=tile_tokens,
    )


def check_plan(plan: MoePlan, device: torch.device) -> None:
    """Check that a plan is one, of tensors that fit each other on `device`."""
    if not isinstance(plan, MoePlan):
        raise TypeError(f"plan: got {type(plan).__name__}, expected a MoePlan, as of moe_route")
    checks.tensor("plan.ids", plan.ids, (torch.int32,), ("T", "top_k"), device)
    checks.tensor("plan.weights", plan.weights, (torch.float32,), plan.ids.shape, device)
    slots = plan.ids.size(0) * plan.ids.size(1)
    checks.tensor("plan.rows", plan.rows, (torch.int32,), (slots,), device)
    checks.tensor("plan.offsets", plan.offsets, (torch.int32,), ("experts + 1",), device)
    if plan.tile_tokens not in TILE_TOKENS:
        expected = ", ".join(map(str, TILE_TOKENS))
        raise ValueError(f"plan.tile_tokens: got {plan.tile_tokens}, expected one of {expected}")
    capacity = most_tiles(slots, plan.experts, plan.tile_tokens)
    checks.tensor("plan.tiles", plan.tiles, (torch.int32,), (capacity, TILE_FIELDS), device)
    checks.tensor("plan.n_tiles", plan.n_tiles, (torch.int32,), (1,), device)
    dense = {"ids": plan.ids, "weights": plan.weights, "rows": plan.rows, "tiles": plan.tiles}
    for name, value in dense.items():
        if not value.is_contiguous():
            raise ValueError(
                f"plan.{name}: got strides {list(value.stride())}, expected contiguous"
            )
