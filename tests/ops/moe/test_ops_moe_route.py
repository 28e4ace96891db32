"""Routing: the choice of experts, their weights, and the rows of each expert."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from moe_cases import poisoned
from ops_cases import assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.moe.plan import MoePlan, most_tiles
from ostinato.ops.moe.route_cuda import segments_of

ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"renormalize": True},
    "olmoe": {},
    "deepseek_v2": {"groups": 4, "top_groups": 2, "routed_scale": 16.0},
    "deepseek_v3": {
        "scoring": "sigmoid",
        "renormalize": True,
        "routed_scale": 2.5,
        "groups": 4,
        "top_groups": 2,
        "group_score": "top2",
        "correction_bias": True,
    },
    "minimax_m2": {"scoring": "sigmoid", "renormalize": True, "correction_bias": True},
    "sigmoid_groups": {"scoring": "sigmoid", "groups": 4, "top_groups": 1, "group_score": "top2"},
}


def router(name: str, experts: int, device: torch.device) -> dict[str, Any]:
    options = dict(ROUTERS[name])
    if options.get("correction_bias"):
        options["correction_bias"] = torch.randn(experts).mul(0.3).to(device)
    return options


def assert_same_plan(got: MoePlan, expected: MoePlan) -> None:
    for name in ("ids", "rows", "offsets", "n_tiles"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name).cpu()), name
    used = int(expected.n_tiles)
    assert torch.equal(got.tiles[:used].cpu(), expected.tiles[:used].cpu())
    assert got.tile_tokens == expected.tile_tokens
    torch.testing.assert_close(got.weights.cpu(), expected.weights.cpu(), equal_nan=True)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "experts"), [(0, 8), (1, 8), (3, 64), (70, 128), (131, 16)])
def test_each_router_as_its_twin(
    name: str, dtype: torch.dtype, tokens: int, experts: int, device: torch.device
) -> None:
    options = router(name, experts, device)
    logits = torch.randn(tokens, experts).to(device, dtype)
    got = ops.moe_route(logits, 2, **options)
    assert_same_plan(got, reference.moe_route(logits.cpu(), 2, **on_cpu(options)))


def on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 80),
    experts=st.sampled_from([1, 4, 40, 96, 256, 512]),
    top_k=st.integers(1, 10),
    active=st.integers(0, 90),
    levels=st.sampled_from([2, 5, 1000]),
    sigmoid=st.booleans(),
)
def test_ties_and_padding_as_the_twin(
    device: torch.device,
    tokens: int,
    experts: int,
    top_k: int,
    active: int,
    levels: int,
    sigmoid: bool,
) -> None:
    """With few levels of logits nearly all are equal: the lowest ids are chosen."""
    top_k = min(top_k, experts)
    logits = torch.randint(0, levels, (tokens, experts)).float().to(device)
    options = {"scoring": "sigmoid" if sigmoid else "softmax", "renormalize": True}
    n_active = int32([active], device)
    got = ops.moe_route(logits, top_k, n_active=n_active, **options)
    expected = reference.moe_route(logits.cpu(), top_k, n_active=n_active.cpu(), **options)
    assert_same_plan(got, expected)
    assert got.tiles.size(0) == most_tiles(tokens * top_k, experts, got.tile_tokens)
    assert int(got.n_tiles) <= got.tiles.size(0)


def test_padding_may_hold_anything(device: torch.device) -> None:
    logits = torch.randn(6, 16).to(device)
    logits[4:] = math.nan
    got = ops.moe_route(logits, 3, n_active=int32([4], device))
    assert (got.ids[4:] == -1).all()
    assert (got.weights[4:] == 0).all()
    assert int(got.n_rows) == 12


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_token_with_nan_has_no_expert(scoring: str, bias: bool, device: torch.device) -> None:
    logits = torch.randn(5, 32).to(device)
    logits[1, 31] = math.nan
    correction = torch.zeros(32, device=device) if bias else None
    got = ops.moe_route(logits, 4, scoring=scoring, correction_bias=correction)
    logits[1] = 0
    fine = ops.moe_route(logits, 4, scoring=scoring, correction_bias=correction)
    assert (got.ids[1] == -1).all()
    assert got.weights[1].isnan().all()
    others = [0, 2, 3, 4]
    assert torch.equal(got.ids[others], fine.ids[others])
    assert_same_bits(got.weights[others], fine.weights[others])
    assert sorted(got.rows.tolist()) == list(range(20))
    assert got.rows[16:].tolist() == [4, 5, 6, 7]


def test_infinite_logits(device: torch.device) -> None:
    """Experts at -inf are chosen last, with a weight of 0; a largest one of inf is an error."""
    logits = torch.full((3, 8), -math.inf, device=device)
    logits[0, 6] = 1.0
    logits[1, 3] = math.inf
    got = ops.moe_route(logits, 3)
    assert got.ids.tolist() == [[6, 0, 1], [-1] * 3, [-1] * 3]
    assert got.weights[0].tolist() == [1.0, 0.0, 0.0]
    assert got.weights[1:].isnan().all()
    got = ops.moe_route(logits, 3, scoring="sigmoid")
    assert got.ids.tolist() == [[6, 0, 1], [3, 0, 1], [0, 1, 2]]


def test_groups_exclude_better_experts(device: torch.device) -> None:
    logits = torch.tensor([[5.0, 0, 0, 0, 3, 3, -9, -9]], device=device)
    options: dict[str, Any] = {"scoring": "sigmoid", "groups": 2}
    assert ops.moe_route(logits, 2, **options).ids.tolist() == [[0, 1]]
    by_two = ops.moe_route(logits, 3, group_score="top2", **options)
    assert by_two.ids.tolist() == [[4, 5, 6]]


def test_a_token_has_the_same_weights_in_every_call(device: torch.device) -> None:
    logits = torch.randn(77, 96).to(device)
    options = router("deepseek_v3", 96, device)
    whole = ops.moe_route(logits, 8, **options)
    for first, stop in ((0, 1), (5, 12), (13, 77)):
        part = ops.moe_route(logits[first:stop], 8, **options)
        assert torch.equal(part.ids, whole.ids[first:stop])
        assert_same_bits(part.weights, whole.weights[first:stop])


def test_rows_of_an_expert_are_in_the_order_of_tokens(device: torch.device) -> None:
    plan = poisoned(ops.moe_route(torch.randn(100, 12).to(device), 5))
    ids, rows = plan.ids.flatten(), plan.rows.long()
    assert sorted(rows.tolist()) == list(range(500))
    for expert in range(12):
        mine = rows[plan.offsets[expert] : plan.offsets[expert + 1]]
        assert (ids[mine] == expert).all()
        assert mine.tolist() == sorted(mine.tolist())


LOGITS = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": [1.0]}, TypeError, "logits: got list"),
        ({"logits": LOGITS.double()}, TypeError, "logits: got dtype torch.float64"),
        ({"logits": LOGITS[0]}, ValueError, r"logits: got shape \[8\]"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits: got experts = 0"),
        ({"logits": torch.zeros(1, 513)}, ValueError, "513 experts, expected at most 512"),
        ({"logits": torch.zeros(1, 64), "groups": 64}, ValueError, "groups: got 64, expected at"),
        ({"top_k": 9}, ValueError, "top_k: got 9, expected at most 8 of 8 experts"),
        ({"top_k": 0}, ValueError, "top_k: got 0"),
        ({"top_k": 2.0}, TypeError, "top_k: got float"),
        ({"groups": 3}, ValueError, "groups: got 3, expected a divisor of 8"),
        ({"groups": 4, "top_k": 3}, ValueError, "top_k: got 3, expected at most 2 of 8"),
        ({"groups": 2, "top_groups": 3}, ValueError, "top_groups: got 3"),
        ({"scoring": "relu"}, ValueError, "scoring: got 'relu', expected 'softmax' or"),
        ({"group_score": "sum"}, ValueError, "group_score: got 'sum'"),
        ({"renormalize": 1}, TypeError, "renormalize: got int"),
        ({"routed_scale": math.inf}, ValueError, "routed_scale: got inf"),
        ({"correction_bias": torch.zeros(7)}, ValueError, r"correction_bias: got shape \[7\]"),
        ({"n_active": torch.zeros(1)}, TypeError, "n_active: got dtype"),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"logits": LOGITS, "top_k": 2} | change
    with pytest.raises(error, match=message):
        ops.moe_route(**arguments)


@given(st.one_of(st.integers(0, 600), st.integers(600, 2**27)))
def test_every_token_is_in_one_segment(tokens: int) -> None:
    segments = segments_of(tokens)
    assert segments >= 1
    if segments > 1:
        size = -(-tokens // segments)  # as the kernel divides them
        assert size <= 65535, "counts have 16 bits"
        assert size * (segments - 1) < tokens <= size * segments, "none is empty"
    else:
        assert tokens <= 32
