"""`bench all-reduce`: cases, checks and rows, with ranks that are threads; what it asks for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType

import pytest
import torch
from bench_adapters import ADAPTERS
from torch import distributed

from ostinato import ops
from ostinato.bench.all_reduce.cases import Case, cases
from ostinato.bench.all_reduce.impls import Inputs, Sums, followed, ours
from ostinato.bench.all_reduce.run import time_case
from ostinato.bench.harness.peers import load_adapter
from ostinato.bench.harness.results import CaseResult
from ostinato.bench.harness.rotation import Call
from ostinato.cli.main import main
from ostinato.ops.collective.communicator import local_communicators, run_ranks


def time_all(case: Case, peer_factor: float, our_factor: float = 1.0) -> list[CaseResult[Case]]:
    def call(ranks: ops.Communicator) -> CaseResult[Case]:
        own = ours(ranks)

        def bind(case: Case, s: Inputs) -> Call:
            whole = own.bind(case, s)
            if our_factor == 1.0:
                return whole
            return lambda: tuple(each + 1 for each in whole())

        def peer(case: Case, s: Inputs) -> Call:
            parts = ranks.all_gather(s.x).view(case.m, ranks.size, case.hidden)
            total = (parts.float().sum(1) * peer_factor).to(s.x.dtype)
            return lambda: followed(case, s, total)

        return time_case(case, [Sums(own.name, bind), Sums("torch", peer)], ranks)

    return run_ranks(local_communicators(case.ranks, timeout_s=60), call)


def test_cases_are_spelt_and_parsed() -> None:
    found = cases(4, [16, 1, 16], 256, ["sum", "fp8"])
    assert [str(case) for case in found] == [
        *("tp4 M1 H256 sum", "tp4 M1 H256 fp8", "tp4 M16 H256 sum", "tp4 M16 H256 fp8")
    ]
    assert [Case.parse(str(case)) for case in found] == found
    assert Case(4, 16, 256, "sum").num_bytes == 2 * 3 * 16 * 256 * 2 // 4
    for text in ("tp4 M1 H256", "tp4 M1 H256 int4", "tp0 M1 H256 sum"):
        with pytest.raises(ValueError, match="case: got"):
            Case.parse(text)


@pytest.mark.parametrize("form", ["sum", "int8", "fp8"])
def test_rows_are_those_of_all_ranks(form: str) -> None:
    first, second = time_all(Case(2, 3, 128, form), 1.0)
    assert first.rows == second.rows
    assert not first.failures
    assert not first.unsupported
    name = {"sum": "ostinato_bf16"}.get(form, f"ostinato_{form}")
    assert [row.impl for row in first.rows] == [name, "torch"]
    assert first.rows[0].peer == "torch"  # however slow
    assert first.rows[0].section == "all_reduce"


def test_wrong_sums_are_not_timed() -> None:
    for result in time_all(Case(2, 3, 128, "sum"), 1.5):
        assert [row.impl for row in result.rows] == ["ostinato_bf16"]
        assert "it is off by 0.5" in result.unsupported["torch"]
    for result in time_all(Case(2, 3, 128, "sum"), 1.0, our_factor=2.0):
        assert [row.impl for row in result.rows] == ["torch"]
        assert "not those of the sum in rank order" in result.failures["ostinato_bf16"]


def test_a_problem_of_one_rank_is_known_to_all() -> None:
    def call(ranks: ops.Communicator) -> CaseResult[Case]:
        def bind(case: Case, s: Inputs) -> Call:
            if ranks.rank == 1:
                raise RuntimeError("no symmetric memory")
            total = s.x
            return lambda: followed(case, s, total)

        lazy = Sums("lazy", bind)
        return time_case(Case(2, 1, 64, "sum"), [ours(ranks), lazy], ranks)

    first, second = run_ranks(local_communicators(2, timeout_s=60), call)
    assert first.unsupported["lazy"] == "rank 1 says what is wrong"
    assert second.unsupported["lazy"] == "no symmetric memory"


def test_one_process_is_told_how_to_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["bench", "all-reduce"]) == 2
    error = capsys.readouterr().err
    assert "got one process, expected one for each of several GPUs: torchrun" in error


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs for two ranks")
def test_ranks_without_gpus_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "all-reduce", "--m", "1", "--device", "cuda"]) == 2
    assert "--device: got 'cuda:1', but torch finds" in capsys.readouterr().err
    assert main(["bench", "all-reduce", "--m", "0"]) == 2
    assert "--rows, --hidden: case: got" in capsys.readouterr().err


def test_vllms_sum_is_timed_where_vllm_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class CustomAllreduce:
        """As vLLM's, of two ranks with the same rows."""

        captured = 0

        def __init__(self, group: str, device: torch.device) -> None:
            assert (group, device) == ("gloo", torch.device("cuda", 3))

        def should_custom_ar(self, x: torch.Tensor) -> bool:
            return x.nbytes < 1024

        def all_reduce(self, x: torch.Tensor, *, registered: bool) -> torch.Tensor:
            return x + x

        @contextmanager
        def capture(self) -> Iterator[None]:
            yield
            CustomAllreduce.captured += 1

    place = "vllm.distributed.device_communicators.custom_all_reduce"
    for name in accumulate(place.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[place], "CustomAllreduce", CustomAllreduce, raising=False)
    monkeypatch.setattr(distributed, "new_group", lambda backend: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    adapter = load_adapter(ADAPTERS / "vllm_all_reduce.py")
    adapter._custom.cache_clear()
    assert adapter.peers("moe", {}) == []
    (sums,) = adapter.peers("all_reduce", {})
    s = Inputs(torch.ones(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16(), torch.ones(64))
    case = Case(2, 2, 64, "sum")
    with sums.capturing():
        (total,) = sums.bind(case, s)()
    assert CustomAllreduce.captured == 1
    assert (total == 2).all()
    many = Inputs(torch.ones(20, 64).bfloat16(), s.residual, s.weight)
    with pytest.raises(ValueError, match="vLLM does not take it for 2560 bytes"):
        sums.bind(case, many)
    adapter._custom.cache_clear()
