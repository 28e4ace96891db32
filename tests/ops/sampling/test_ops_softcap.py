"""Capping logits against the reference, which rows it leaves, and what it launches."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from ops_cases import FLOATS, assert_close, assert_same_bits

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.common.pdl import pdl
from ostinato.ops.sampling.softcap import Softcap

softcap_module = import_module("ostinato.ops.sampling.softcap")

pytestmark = pytest.mark.usefixtures("kernels")


def logits_of(
    batch: int, vocabulary: int, dtype: torch.dtype, device: torch.device, apart: int = 0
) -> torch.Tensor:
    """Return rows that lie `apart`, with 77 between them."""
    storage = torch.full((batch, vocabulary + apart), 77.0)
    storage[:, :vocabulary] = 40 * torch.randn(batch, vocabulary)
    return storage.to(dtype).to(device)[:, :vocabulary]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 8, 2048, 2049, 9000])
@pytest.mark.parametrize("batch", [1, 3, 33])
def test_error_is_within_twice_torchs(
    batch: int, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> None:
    for apart in (0, 3, 8):
        logits = logits_of(batch, vocabulary, dtype, device, apart)
        before = logits.clone()
        assert ops.softcap(logits, 30.0) is logits
        assert_close(logits, lambda wanted, x=before: reference.softcap(x, 30.0, dtype=wanted))
        if apart:
            assert (logits._base[:, vocabulary:] == 77).all()


CASES = [(0.0, 1.0, False), (0.0, 1.5, True), (0.7, 1.0, True), (2.0, 0.5, True)]
CASES += [(math.nan, 1.0, False)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("penalized", [False, True])
def test_greedy_rows_without_a_penalty_stay(
    dtype: torch.dtype, penalized: bool, device: torch.device
) -> None:
    logits = logits_of(len(CASES), 300, dtype, device)
    before = logits.clone()
    temperature, penalty, changed = (list(column) for column in zip(*CASES, strict=True))
    rows: dict[str, torch.Tensor] = {"temperature": torch.tensor(temperature, device=device)}
    if penalized:
        rows["repetition_penalty"] = torch.tensor(penalty, device=device)
    else:
        changed = [value > 0 for value in temperature]
    ops.softcap(logits, 2.0, **rows)
    whole = ops.softcap(before.clone(), 2.0)
    for row, capped in enumerate(changed):
        assert_same_bits(logits[row], whole[row] if capped else before[row])
    assert_close(logits, lambda wanted: reference.softcap(before, 2.0, **rows, dtype=wanted))


def test_no_row_is_capped_that_holds_what_is_not_defined(device: torch.device) -> None:
    logits = torch.full((4, 50), math.nan, device=device)
    before = logits.clone()
    ops.softcap(logits, 2.0, temperature=torch.zeros(4, device=device))
    assert_same_bits(logits, before)


def test_odd_logits(device: torch.device) -> None:
    logits = torch.tensor([[math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, 3e38]], device=device)
    ops.softcap(logits, 30.0)
    assert logits[0, 0].isnan()
    assert logits[0, 1:].tolist() == pytest.approx([30.0, -30.0, 0.0, 0.0, 0.0, 30.0], abs=1e-40)


@given(
    cap=st.floats(2.0**-6, 1000, width=32),
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=20),
)
def test_order_and_bounds_are_kept(cap: float, values: list[float]) -> None:
    logits = torch.tensor([values])
    capped = ops.softcap(logits.clone(), cap)
    assert (capped.abs() <= cap * (1 + 1e-6)).all()
    assert (capped.abs() <= logits.abs() * (1 + 1e-5) + 1e-37).all()
    order = logits[0].argsort(stable=True)
    assert (capped[0, order].diff() >= 0).all()


def test_no_rows(device: torch.device) -> None:
    for shape in ((0, 9), (3, 0)):
        assert ops.softcap(torch.empty(shape, device=device), 1.0).shape == shape


@pytest.mark.parametrize("real", [0, 2, 5, 9])
def test_real_rows_are_capped_whatever_the_padding(real: int, device: torch.device) -> None:
    logits = logits_of(5, 3000, torch.float32, device)
    whole = ops.softcap(logits.clone(), 5.0)
    n_active = torch.tensor([real], dtype=torch.int32, device=device)
    ops.softcap(logits, 5.0, n_active=n_active)
    assert_same_bits(logits[:real], whole[:real])


LOGITS = torch.zeros(3, 8)
BAD = [
    ({"logits": [1.0]}, TypeError, "logits: got list, expected a tensor"),
    ({"logits": LOGITS.double()}, TypeError, "logits: got dtype torch.float64, expected"),
    ({"logits": LOGITS[0]}, ValueError, r"logits: got shape \[8\], expected \[B, V\]"),
    ({"logits": torch.zeros(8, 3).t()}, ValueError, "logits: got strides"),
    ({"logits": torch.zeros(1, 8).expand(3, 8)}, ValueError, "logits: got strides"),
    ({"cap": 0}, ValueError, "cap: got 0, expected a finite number of at least 1"),
    ({"cap": -1.0}, ValueError, r"cap: got -1\.0, expected a finite number of at least 1"),
    ({"cap": math.inf}, ValueError, "cap: got inf, expected a finite number"),
    ({"cap": None}, TypeError, "cap: got NoneType, expected a number"),
    ({"temperature": torch.zeros(2)}, ValueError, r"temperature: got shape \[2\], expected \[3\]"),
    ({"temperature": torch.zeros(3).half()}, TypeError, "temperature: got dtype torch.float16"),
    ({"repetition_penalty": torch.ones(3)}, ValueError, "repetition_penalty: got a tensor, expec"),
    (
        {"temperature": torch.ones(3), "repetition_penalty": torch.ones(4)},
        ValueError,
        r"repetition_penalty: got shape \[4\]",
    ),
    ({"n_active": 3}, TypeError, "n_active: got int, expected a tensor"),
    ({"stream": 0}, ValueError, "stream: got 0, expected None"),
]


@pytest.mark.parametrize(("changes", "error", "match"), BAD, ids=[row[2] for row in BAD])
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    logits = torch.ones(3, 8)
    with pytest.raises(error, match=match):
        ops.softcap(**{"logits": logits, "cap": 3.0, **changes})
    assert (logits == 1).all()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Give what would have been launched: the kernel's arguments and its `variant`."""
    found: list[dict[str, Any]] = []

    class Library:
        def __init__(self, variant: Softcap) -> None:
            self._variant = variant

        def launch(self, **arguments: Any) -> None:
            found.append({"variant": self._variant, **arguments})

    monkeypatch.setattr(softcap_module, "load", lambda variant, **_: Library(variant))
    monkeypatch.setattr(softcap_module, "current_stream", lambda device: 7)
    monkeypatch.setattr(softcap_module, "on_device", lambda device: torch.no_grad())
    return found


def test_every_tensor_reaches_the_kernel_as_it_lies(launches: list[dict[str, Any]]) -> None:
    logits = torch.zeros(3, 20, dtype=torch.bfloat16)[:, :16]
    temperature, penalty = torch.ones(3), torch.ones(3)
    n_active = torch.ones(1, dtype=torch.int32)
    softcap_module.softcap_rows(logits, 2.5, temperature, penalty, n_active)
    with pdl(False):
        softcap_module.softcap_rows(torch.zeros(2, 5), 1.0, None, None, None)
    first, second = launches
    assert first == {
        "variant": Softcap(dtype="bf16"),
        "logits": logits.data_ptr(),
        "logits_stride": 20,
        "cap": 2.5,
        "temperature": temperature.data_ptr(),
        "repetition_penalty": penalty.data_ptr(),
        "n_active": n_active.data_ptr(),
        "rows": 3,
        "vocabulary": 16,
        "pdl": True,
        "stream": 7,
    }
    assert second["variant"] == Softcap(dtype="fp32")
    for name in ("temperature", "repetition_penalty", "n_active", "pdl"):
        assert second[name] == 0


@pytest.mark.gpu
def test_more_rows_than_a_grid_has_and_more_than_2_31_logits() -> None:
    device = torch.device("cuda")
    rows, vocabulary = 70000, 2**31 // 70000 // 8 * 8 + 8
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device=device).fill_(8.0)
    ops.softcap(logits, 4.0)
    want = ops.softcap(torch.full((1, 1), 8.0, device=device).bfloat16(), 4.0)
    for row in (0, 65534, 65535, rows - 1):
        assert (logits[row] == want[0, 0]).all()


@pytest.mark.gpu
def test_a_captured_step_caps_what_it_samples_from() -> None:
    """One launch between product and sampling, whatever rows are greedy at a replay."""
    device = torch.device("cuda")
    logits, out = (torch.empty(6, 4000, device=device) for _ in range(2))
    temperature = torch.zeros(6, device=device)

    def step() -> None:
        out.copy_(logits)
        ops.softcap(out, 3.0, temperature=temperature)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(5):
        logits.normal_(std=20.0)
        temperature.copy_(torch.arange(6) % (turn + 2))
        graph.replay()
        assert_same_bits(out, ops.softcap(logits.clone(), 3.0, temperature=temperature))


@pytest.mark.gpu
def test_a_chain_of_launches_waits_for_each_one() -> None:
    start = 40 * torch.randn(40, 32000, device="cuda")
    results = []
    for overlap in (True, False):
        logits = start.clone()
        with pdl(overlap):
            for turn in range(200):
                ops.softcap(logits, 30.0 + turn % 3)
        results.append(logits)
    assert_same_bits(*results)


def test_logits_that_want_a_gradient_are_refused() -> None:
    logits = torch.randn(3, 16, requires_grad=True)
    with pytest.raises(ValueError, match="logits: got a tensor that requires a gradient"):
        ops.softcap(logits * 2, 1.5)
    with torch.no_grad():
        assert not ops.softcap(logits * 2, 1.5).requires_grad
