"""Logits of which the best are handed over: the tokens of logits that are written and read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops_cases import E4M3, assert_same_bits
from ops_kernels import LOGITS_FEATURES, LOGITS_TOKENS, VOCABULARIES

from ostinato import ops
from ostinato.ops.linear.w8a8_gemm import argmax_parts

pytestmark = pytest.mark.usefixtures("kernels")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EPS = 1e-5


def layer(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return arguments of `rms_norm_w8a8_linear`."""
    w = torch.randn(n, k).mul(20).to(dtype).to(device)
    return {
        "x": torch.randn(m, k).bfloat16().to(device),
        "residual": torch.randn(m, k).bfloat16().to(device),
        "weight": (torch.rand(k) + 0.5).bfloat16().to(device),
        "eps": EPS,
        "w": ops.pack_weight(w) if device.type == "cuda" else w,
        "w_scale": (torch.rand(n) * 0.01 + 0.001).to(device),
    }


def columns(m: int, device: torch.device, *, greedy: bool = False) -> dict[str, torch.Tensor]:
    """Return arguments of `sample`: greedy rows, random ones, and both with a penalty or not."""
    rows = torch.arange(m)
    temperature = torch.tensor([0.0, 0.8, math.nan, -1.0])[rows % 4]
    penalty = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.3])[rows % 5]
    drawn = {
        "temperature": torch.zeros(m) if greedy else temperature,
        "repetition_penalty": torch.ones(m) if greedy else penalty,
        "top_k": torch.tensor([0, 50])[rows % 2].int(),
        "top_p": torch.ones(m),
        "min_p": torch.zeros(m),
        "seeds": rows * 7,
        "counters": rows,
    }
    return {name: x.to(device) for name, x in drawn.items()}


def chosen(arguments: dict[str, Any], row: dict[str, torch.Tensor], seen: torch.Tensor) -> Any:
    """Return the tokens chosen of logits that are all there, and of those to be sampled."""
    invariant = {"batch_invariant": True}
    whole, _ = ops.rms_norm_w8a8_linear(**arguments, out_dtype=torch.float32, **invariant)
    how = {name: row[name] for name in ("temperature", "repetition_penalty")}
    logits = ops.rms_norm_w8a8_logits(**arguments, **how, **invariant)
    expected = ops.sample(whole, **row, seen=seen)
    got = ops.sample(logits.values, **row, seen=seen, argmax=logits.argmax)
    return whole, logits, expected, got


def dense_layer(m: int, n: int, k: int, device: torch.device) -> dict[str, Any]:
    """Return arguments of `linear`."""
    w = torch.randn(n, k).bfloat16().to(device)
    return {
        "x": torch.randn(m, k).bfloat16().to(device),
        "w": ops.pack_weight(w) if device.type == "cuda" else w,
        "bias": torch.randn(n).to(device),
    }


def chosen_dense(
    arguments: dict[str, Any], row: dict[str, torch.Tensor], seen: torch.Tensor
) -> Any:
    """Do as `chosen` for `linear_logits`."""
    whole = ops.linear(**arguments, out_dtype=torch.float32)
    how = {name: row[name] for name in ("temperature", "repetition_penalty")}
    logits = ops.linear_logits(**arguments, **how)
    expected = ops.sample(whole, **row, seen=seen)
    got = ops.sample(logits.values, **row, seen=seen, argmax=logits.argmax)
    return whole, logits, expected, got


def test_on_the_cpu_all_dense_logits_are_there() -> None:
    m, n = 20, 300
    arguments, row = dense_layer(m, n, 64, CPU), columns(m, CPU)
    whole, logits, expected, got = chosen_dense(arguments, row, torch.rand(m, n) < 0.3)
    assert logits.argmax is None
    assert logits.values.dtype is torch.float32
    assert_same_bits(logits.values, whole)
    assert_same_bits(got, expected)


def test_the_dense_op_hands_over_the_best_on_the_cpu_too() -> None:
    m, n = 12, 40
    arguments, row = dense_layer(m, n, 64, CPU), columns(m, CPU, greedy=True)
    arguments["bias"][7] = 1000.0
    out, argmax = torch.empty(m, n), torch.empty(m, 1, dtype=torch.int64)
    given = (*arguments.values(), None, row["temperature"], None, out, argmax)
    op = torch.ops.ostinato.linear_logits.default
    op(*given)
    assert_same_bits(out, ops.linear(**arguments, out_dtype=torch.float32))
    tokens = ops.sample(torch.randn(m, n), **row, seen=torch.zeros(m, n) > 0, argmax=argmax)
    assert_same_bits(tokens, torch.full((m,), 7))
    torch.library.opcheck(op, given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": torch.zeros(3)}, r"temperature: got shape \[3\], expected \[4\]"),
        ({"repetition_penalty": torch.ones(5)}, r"repetition_penalty: got shape \[5\]"),
        ({"bias": torch.ones(8).half()}, "bias: got dtype torch.float16"),
        ({"n_active": torch.ones(1)}, "n_active: got dtype torch.float32"),
    ],
)
def test_bad_arguments_of_dense_logits(changed: dict[str, Any], message: str) -> None:
    arguments = {**dense_layer(4, 8, 16, CPU), "temperature": torch.zeros(4)}
    with pytest.raises((TypeError, ValueError), match=message):
        ops.linear_logits(**{**arguments, **changed})


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("n", VOCABULARIES)
@pytest.mark.parametrize("m", LOGITS_TOKENS)
def test_tokens_are_those_of_whole_dense_logits(m: int, n: int, greedy: bool) -> None:
    arguments, row = dense_layer(m, n, LOGITS_FEATURES, CUDA), columns(m, CUDA, greedy=greedy)
    arguments["x"][m // 2] = 0
    arguments["bias"][n // 2 :] = arguments["bias"].amax()  # equal ones
    if m > 4:
        arguments["x"][4] = math.nan
    whole, logits, expected, got = chosen_dense(arguments, row, torch.rand(m, n, device=CUDA) < 0.3)
    assert_same_bits(got, expected)
    parts = argmax_parts(arguments["x"], n, arguments["w"].data, True)
    assert (logits.argmax is None) == (parts == 0)
    read = (row["temperature"] > 0) | (row["repetition_penalty"] != 1)
    assert_same_bits(logits.values[read], whole[read])


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_on_the_cpu_all_logits_are_there(dtype: torch.dtype) -> None:
    m, n = 20, 300
    arguments, row = layer(m, n, 64, dtype, CPU), columns(m, CPU)
    whole, logits, expected, got = chosen(arguments, row, torch.rand(m, n) < 0.3)
    assert logits.argmax is None
    assert_same_bits(logits.values, whole)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("nan", [False, True])
def test_the_op_hands_over_the_best_on_the_cpu_too(nan: bool) -> None:
    m, n = 12, 40
    arguments, row = layer(m, n, 64, torch.int8, CPU), columns(m, CPU, greedy=True)
    if nan:
        arguments["w_scale"][7] = math.nan
    arguments["x"][3], arguments["residual"][3] = 0, 0  # all logits are equal
    out, argmax = torch.empty(m, n), torch.empty(m, 1, dtype=torch.int64)
    names = ("x", "weight", "eps", "residual", "w", "w_scale")
    given = (*(arguments[name] for name in names), None, None, False)
    op = torch.ops.ostinato.rms_norm_w8a8_logits.default
    op(*given, row["temperature"], None, out, argmax)
    tokens = ops.sample(torch.randn(m, n), **row, seen=torch.zeros(m, n) > 0, argmax=argmax)
    assert_same_bits(tokens, torch.full((m,), -1) if nan else out.argmax(1))
    torch.library.opcheck(op, (*given, row["temperature"], None, out, argmax))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": torch.zeros(3)}, r"temperature: got shape \[3\], expected \[4\]"),
        ({"temperature": torch.zeros(4).int()}, "temperature: got dtype torch.int32"),
        ({"repetition_penalty": torch.ones(5)}, r"repetition_penalty: got shape \[5\]"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], message: str) -> None:
    arguments = {**layer(4, 8, 16, torch.int8, CPU), "temperature": torch.zeros(4)}
    with pytest.raises((TypeError, ValueError), match=message):
        ops.rms_norm_w8a8_logits(**{**arguments, **changed})


def test_bad_places_are_refused() -> None:
    row = columns(2, CPU, greedy=True)
    logits, seen = torch.zeros(2, 3), torch.zeros(2, 3) > 0
    for argmax, message in (
        (torch.zeros(2, 4), "argmax: got dtype torch.float32"),
        (torch.zeros(3, 4, dtype=torch.int64), r"argmax: got shape \[3, 4\]"),
        (torch.zeros(2, 0, dtype=torch.int64), "argmax: got P = 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ops.sample(logits, **row, seen=seen, argmax=argmax)


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("n", VOCABULARIES)
@pytest.mark.parametrize("m", LOGITS_TOKENS)
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_tokens_are_those_of_whole_logits(dtype: torch.dtype, m: int, n: int, greedy: bool) -> None:
    arguments, row = layer(m, n, LOGITS_FEATURES, dtype, CUDA), columns(m, CUDA, greedy=greedy)
    arguments["x"][m // 2], arguments["residual"][m // 2] = 0, 0  # all logits are equal
    if m > 4:
        arguments["x"][4] = math.nan
    whole, logits, expected, got = chosen(arguments, row, torch.rand(m, n, device=CUDA) < 0.3)
    assert_same_bits(got, expected)
    parts = argmax_parts(arguments["x"], n, arguments["w"].data, True)
    # Others are chosen for up to 16 tokens, few channels, and many tokens of so few features.
    assert (logits.argmax is None) == (parts == 0)
    assert parts > 0 or m < 17 or m > 128 or n < 32000
    read = (row["temperature"] > 0) | (row["repetition_penalty"] != 1)
    assert_same_bits(logits.values[read], whole[read])


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("m", [32, 256])
def test_equal_logits_and_nan_in_some_channels(m: int) -> None:
    n = 32000
    arguments, row = layer(m, n, 512, torch.int8, CUDA), columns(m, CUDA, greedy=True)
    codes = torch.randint(-9, 9, (40, 512), dtype=torch.int8, device=CUDA).repeat(n // 40, 1)
    arguments["w"] = ops.pack_weight(codes)
    arguments["w_scale"].fill_(0.01)
    seen = torch.zeros(m, n, dtype=torch.bool, device=CUDA)
    _, _, expected, got = chosen(arguments, row, seen)
    assert_same_bits(got, expected)
    assert int(got.max()) < 40
    arguments["w_scale"][[17001, 16999, 30000]] = math.nan
    _, _, expected, got = chosen(arguments, row, seen)
    assert_same_bits(got, expected)
    assert int(got.min()) == int(got.max()) == -1
