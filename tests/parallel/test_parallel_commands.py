"""`generate` and `serve` on two ranks: rank 0 is heard, and ends the other."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from page_blocks import code_blocks
from rank_forks import LONGEST_S, Forks
from safetensors.torch import load_file, save_file

from effort import LONG, long_only
from server_process import TINY_LLAMA, free_port, is_ready

FLAGS = ["--device", "cpu", "--no-verify"]
SERVED = [*FLAGS, "--capture-sizes", "1", "--num-pages", "64"]
GENERATE = ["generate", str(TINY_LLAMA), *FLAGS, "--max-tokens"]


Run = Callable[..., Future[dict[str, Any]]]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with closing(Forks(at_once=2)) as made:
        yield made


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Run:
    """Run a command on two ranks, with words of their own where there is a list of them."""

    def start(argv: list[str | list[str]], **case: Any) -> Future[dict[str, Any]]:
        return forks.run({"size": 2, "argv": argv, "pids": str(tmp_path), **case})

    return start


def codes(report: dict[str, Any]) -> list[int | None]:
    return [rank["code"] for rank in report["ranks"]]


def wait_for(condition: Callable[[], Any], report: Future[dict[str, Any]]) -> Any:
    deadline = time.monotonic() + LONGEST_S
    while not (found := condition()):
        assert not report.done(), report.result()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def ask(port: int, tokens: int) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
    body = {"prompt": "Classes", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_generate_prints_on_rank_0_alone(run: Run) -> None:
    argv = [*GENERATE, "8", "Classes", "A list display", "--json"]
    first, second = run(argv).result()["ranks"]
    assert first["code"] == second["code"] == 0, (first["stderr"], second["stderr"])
    document = json.loads(first["told"][0]["printed"])
    assert [len(c["token_ids"]) for c in document["completions"]] == [8, 8]
    assert second["told"][0]["printed"] == ""


def test_bench_engine_measures_all_ranks_on_rank_0(run: Run) -> None:
    argv = ["bench", "engine", "--shape", "tiny", "--dtype", "bf16", "int8", "--device", "cpu"]
    argv += ["--prompt", "4", "--output", "1", "9", "--repeats", "1", "--tp", "2"]
    first, second = run(argv).result()["ranks"]
    assert first["code"] == second["code"] == 0, (first["stderr"], second["stderr"])
    assert first["told"][0]["printed"].count("tiny tp2 b1 prompt4") == 4
    assert second["told"][0]["printed"] == ""


def test_bench_all_reduce_measures_on_rank_0(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sums.json"
    argv = ["bench", "all-reduce", "--m", "1", "5", "--hidden", "256", "--form", "sum", "int8"]
    first, second = run([*argv, "--device", "cpu", "--json", str(file)]).result()["ranks"]
    assert first["code"] == second["code"] == 0, (first["stderr"], second["stderr"])
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        *("tp2 M1 H256 sum", "tp2 M1 H256 int8", "tp2 M5 H256 sum", "tp2 M5 H256 int8")
    ]
    assert "tp2 M5 H256 int8" in first["told"][0]["printed"]
    assert second["told"][0]["printed"] == ""


def test_a_mistake_is_told_once(run: Run) -> None:
    first, second = run([*GENERATE, "8", ""]).result()["ranks"]
    assert first["code"] == 2
    assert "prompt 1: got no tokens" in first["stderr"]
    assert second["code"] in (1, 2)
    assert "got no tokens" not in second["stderr"]


def test_a_mistake_before_the_start_is_told_by_who_makes_it(run: Run) -> None:
    flags = [*GENERATE, "8", "a", "-tp", ["2", "4"], "--group-timeout", "4"]
    first, second = run(flags).result()["ranks"]
    assert first["code"] == 1
    assert "rank 1 did not come to 'the start' in 4 s" in first["stderr"]
    assert second["code"] == 2
    assert (
        "error on rank 1: --tensor-parallel-size: got 4, expected 2, the number of processes"
        in second["stderr"]
    )


def test_ranks_with_another_timeout_are_named(run: Run) -> None:
    flags = [*GENERATE, "8", "a", "--group-timeout", ["20", "30"]]
    for rank in run(flags).result()["ranks"]:
        assert "rank 1 has timeout_s 30.0, expected 20.0 as on rank 0" in rank["stderr"]


def test_ranks_with_other_weights_are_refused(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(TINY_LLAMA, tmp_path / f"model{rank}")
    (file,) = (tmp_path / "model1").glob("*.safetensors")
    weights = load_file(file)
    # As another training would leave it: shapes and names stay.
    weights["model.embed_tokens.weight"] *= 1.01
    save_file(weights, file, {"format": "pt"})
    models = [str(tmp_path / f"model{rank}") for rank in range(2)]
    argv = ["generate", models, *FLAGS, "--max-tokens", "4", "Classes"]
    first, second = run(argv).result()["ranks"]
    assert first["code"] == 2
    assert "checkpoint: got 'config " in first["stderr"]
    assert "on rank 1, expected 'config " in first["stderr"]
    assert second["code"] in (1, 2)


def test_ctrl_c_of_all_ranks_shows_what_there_is(run: Run, tmp_path: Path) -> None:
    argv = [*GENERATE, "400", "Classes", "--json"]
    report = run(argv)
    wait_for(lambda: (tmp_path / "received").exists(), report)
    for rank in pids(tmp_path):
        os.kill(rank, signal.SIGINT)
    first, second = report.result()["ranks"]
    assert first["code"] == 130, first["stderr"]
    assert second["code"] == 0, second["stderr"]
    assert json.loads(first["told"][0]["printed"])["interrupted"]


def pids(folder: Path) -> list[int]:
    return [int((folder / rank).read_text()) for rank in ("0", "1")]


def test_a_server_drains_both_ranks_at_sigterm(run: Run, tmp_path: Path) -> None:
    port = free_port()
    argv = ["serve", str(TINY_LLAMA), *SERVED, "--port", str(port), "-tp", "2"]
    report = run(argv)
    wait_for(lambda: is_ready(port), report)
    status, document = ask(port, 5)
    assert (status, document["usage"]["completion_tokens"]) == (200, 5)
    for rank in pids(tmp_path):
        os.kill(rank, signal.SIGTERM)
    assert codes(report.result()) == [0, 0], report.result()


@pytest.mark.parametrize("kind", ["kill", "stop"] if LONG else ["kill"])
def test_a_server_that_loses_a_rank_answers_503(run: Run, kind: str) -> None:
    port = free_port()
    argv = ["serve", str(TINY_LLAMA), *SERVED, "--port", str(port), "--group-timeout", "10"]
    fault = {"rank": 1, "place": "idle", "count": 40, "kind": kind}
    report = run(argv, fault=fault)
    wait_for(lambda: is_ready(port), report)
    assert ask(port, 5)[0] == 200
    status, document = ask(port, 400)
    assert (status, document["error"]["code"]) == (503, "engine_lost")
    first, second = report.result()["ranks"]
    assert first["code"] == 1
    assert second["code"] in (-signal.SIGKILL, None)
    assert "rank 1 " in first["stderr"]


def test_the_page_has_a_program_for_every_rank(forks: Forks) -> None:
    (block,) = code_blocks("docs/tensor-parallel.md")
    code = block.replace('"MODEL"', repr(str(TINY_LLAMA)))
    on_the_host = code.replace('"cuda", rank_here()', '"cpu"')
    assert code != on_the_host
    first, second = forks.run({"size": 2, "code": on_the_host}).result()["ranks"]
    assert first["code"] == second["code"] == 0, (first["stderr"], second["stderr"])
    assert len(first["told"][0]["printed"]) > 9
    assert second["told"][0]["printed"] == ""


def torchrun(ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command with real processes, each of which imports torch."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("-m", "ostinato", *argv),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )


@long_only
def test_torchrun_starts_ranks() -> None:
    done = torchrun(2, *GENERATE, "8", "Classes", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["completions"]) == 1


@long_only
@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "q_proj: got 6 groups of 32 rows for 4 ranks"), (["-tp", "2"], "got 2, expected 4")],
)
def test_torchrun_leaves_rank_0_time_to_print(flags: list[str], message: str) -> None:
    # It ends all processes as soon as one has ended, and of these rank 0 alone prints.
    done = torchrun(4, *GENERATE, "8", "Classes", *flags)
    assert done.returncode != 0
    assert done.stderr.count(message) == 1, done.stderr
