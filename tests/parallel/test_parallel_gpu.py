"""Ranks on GPUs: one alone gives the texts of no ranks, two agree and end together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_cases import USES
from rank_forks import LONGEST_S, run_cases
from test_parallel_faults import GPU_TIMEOUT_S, SHORT, problems

from server_process import TINY_LLAMA, free_port

PROGRAM = """
import json, os, signal, sys
import torch
from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.engine import Engine, SamplingParams
from ostinato.parallel import rank_here, start_ranks

folder, dies = sys.argv[1], int(sys.argv[2])
device = torch.device("cuda", rank_here())
params = SamplingParams(max_tokens=200, ignore_eos=True)
options = {"max_batch": 2, "num_pages": 64}
with start_ranks(device, timeout_s=30) as ranks:
    model = load_model(folder, device=device, communicator=ranks.connect(device))
    engine = Engine(model, load_tokenizer(folder), ranks=ranks, **options)
    if not ranks.leads:
        if dies:
            receive, count = ranks.channel.receive, iter(range(dies, -1, -1))
            ranks.channel.receive = lambda: next(count) and receive() or os.kill(os.getpid(), 9)
        engine.follow()
    else:
        engine.capture([2], progress=False)
        texts = [list(c.token_ids) for c in engine.generate(["Classes", "A list"], params)]
        engine.close()
        print(json.dumps(texts))
if ranks.size == 1:
    engine = Engine(load_model(folder, device=device), load_tokenizer(folder), **options)
    engine.capture([2], progress=False)
    print(json.dumps([list(c.token_ids) for c in engine.generate(["Classes", "A list"], params)]))
"""


def run_program(path: Path, size: int, dies: int = 0) -> list[subprocess.CompletedProcess[str]]:
    """Run it on so many ranks; one of them ends at its n-th call of rank 0's."""
    path.write_text(PROGRAM)
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, str(path), str(TINY_LLAMA), str(dies)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    done = []
    for process in running:
        out, error = process.communicate(timeout=3 * LONGEST_S)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    return done


@pytest.mark.gpu
def test_one_rank_gives_the_texts_of_none(tmp_path: Path) -> None:
    (rank,) = run_program(tmp_path / "program.py", 1)
    assert rank.returncode == 0, rank.stderr
    with_ranks, without = map(json.loads, rank.stdout.splitlines())
    assert with_ranks == without


@pytest.mark.gpu
def test_two_ranks_give_the_same_texts_again(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    runs = [run_program(tmp_path / "program.py", 2) for _ in range(2)]
    for ranks in runs:
        assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert runs[0][0].stdout == runs[1][0].stdout


@pytest.mark.gpu
def test_a_killed_rank_is_named_by_the_other(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = run_program(tmp_path / "program.py", 2, dies=60)
    assert second.returncode == -9
    assert first.returncode == 1
    assert "rank 1 has ended" in first.stderr
    assert not first.stdout


@pytest.mark.gpu
def test_what_happens_to_one_gpus_rank_is_named_by_the_other() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    common = {"scenario": "serve", "device": "cuda", "timeout_s": GPU_TIMEOUT_S}
    faults = [
        {"rank": rank, "place": place, "count": count, "kind": kind}
        for place, count, rank, kind in SHORT
    ]
    cases = [{**common, "size": 2, "keeper": True, "fault": fault} for fault in faults]
    alone, *reports = run_cases([{**common, "size": 1, "alone": True}, *cases], at_once=4)
    assert alone["ranks"][0]["code"] == 0, alone["ranks"][0]["stderr"]
    expected = alone["ranks"][0]["told"][:-1]
    wrong = [problem for report in reports for problem in problems(report, expected)]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.timeout(150)
def test_what_two_gpus_serve_is_what_one_serves() -> None:
    """Each use of an engine; grammars are of the host, and tried there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    used = {"scenario": "everything", "device": "cuda", "skipped": ["structured"]}
    cases = [{**used, "size": 1, "alone": True}, {**used, "size": 2, "timeout_s": 60}]
    alone, together = run_cases(cases, at_once=2)
    for rank in (*alone["ranks"], *together["ranks"]):
        assert rank["code"] == 0, rank["stderr"]
    expected, found = alone["ranks"][0]["told"], together["ranks"][0]["told"]
    assert len(expected) == len(USES)  # without one, with the end
    assert found == expected
