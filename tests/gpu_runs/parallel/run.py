"""What run.sh beside this file runs: one part, named by the first argument.

    run.py count                 how many GPUs there are (TP_CPU=1: 2)
    run.py kernels RANKS         names of the kernels of ours that the parts launch; needs no GPU
    run.py engine_flags          of `bench engine`, for a 70B model and vLLM's step
    torchrun ... run.py replays  by every rank
    run.py faults RANKS          injected faults, side by side
    run.py vllm RANKS            starts vLLM, waits for W/go, and times it
    run.py join                  engine_tp.json of what W has

Environment: OUT, W (/tmp/tp_run), THEIRS (PYTHONPATH of vLLM's processes), TP_CPU=1 for a trial
without GPUs, FAULTS (200), FAULTS_S (190: no fault is injected later), AT_ONCE (16).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ostinato.models import Decoder
    from ostinato.parallel import Ranks

ROOT = Path(__file__).parents[3]
sys.path[:0] = [
    str(ROOT / "tests" / folder) for folder in ("", "gpu_runs", "parallel", "compat/vllm")
]

CPU = os.environ.get("TP_CPU") == "1"
OUT = Path(os.environ.get("OUT", "/tmp/tp_out"))
W = Path(os.environ.get("W", "/tmp/tp_run"))
SHAPE = "tiny" if CPU else "llama-3.1-70b"
EXPERTS = "tiny-moe" if CPU else "qwen3-30b-a3b"
BATCHES = (1, 2) if CPU else (1, 32)
PROMPT, COUNTS, REPEATS = (4, (2, 12), 1) if CPU else (128, (32, 160), 3)
GIB = 2**30
T0 = time.time()


def say(*words: object) -> None:
    print(f"[{time.time() - T0:6.1f}]", *words, flush=True)


def document(versions: dict[str, str]) -> dict[str, Any]:
    """Return a results file without rows."""
    import torch

    from ostinato.bench.report import Report

    report = Report.for_device(torch.device("cpu" if CPU else "cuda"))
    head = {"gpu": report.gpu, "versions": {**report.versions, **versions}}
    return {**head, "commit": report.commit}


def write(file: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a results file, a line for each row."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n')
    whole.replace(file)


def count() -> None:
    import torch

    print(2 if CPU else torch.cuda.device_count())


def engine_flags() -> None:
    flags = ["--shape", SHAPE, "--dtype", "int8", "--lm-head", "bf16", "--prompt", PROMPT]
    flags += ["--batch", *BATCHES, "--output", *COUNTS, "--repeats", REPEATS]
    print(*flags)


def kernels(ranks: int) -> None:
    """Print what a rank of each model launches, and what tests of collectives do."""
    import torch
    from hollow_weights import Hollow

    from ostinato.bench.shapes import SHAPES
    from ostinato.cli.build import _model_kernels
    from ostinato.jit.variant import Variant
    from ostinato.models import family_of, kv_format, read_config
    from ostinato.ops.collective.collective_cuda import collective_kernel
    from ostinato.ops.collective.communicator import local_communicators
    from ostinato.ops.linear.quantize_cuda import input_kernel
    from tiny import tiny_llama

    bf16, fp32 = torch.bfloat16, torch.float32

    need: set[Variant] = set()
    for shape in (SHAPE, EXPERTS):
        config = read_config({**SHAPES[shape], "num_hidden_layers": 1})
        family = family_of(config)
        loader = Hollow(torch.device("cpu"), "int8", "bf16", True, local_communicators(ranks)[0])
        layout = family.layout(config).shard(0, ranks)
        model = family.load(
            config.of_rank(ranks), layout, loader, max_context=1024, batch_invariant=True
        )
        need |= set(model.kernels())
    # Of the tests of ranks, and of `bench all-reduce`.
    tiny = ROOT / "examples/tiny-llama"
    for size in (1, 2):
        need |= _model_kernels(tiny, lm_head=None, batch_invariant=True, ranks=size)
    for size in {2, 4, 8, ranks}:
        for dtype in (bf16, torch.float16, fp32):
            need |= {collective_kernel(kind, size, dtype, dtype) for kind in ("sum", "gather")}
        for codes in (torch.int8, torch.float8_e4m3fn):
            need.add(collective_kernel("rms_norm", size, bf16, codes))
    for codes in (torch.int8, torch.float8_e4m3fn):
        need.add(input_kernel("rms_norm", bf16, codes))
    # Of faults, whose ranks must not wait for a compiler, and of the tests beside them.
    for scheme, cache in (("plain", "auto"), ("int8", "fp8")):
        tiny_model = tiny_llama("cpu", scheme)
        need |= set(tiny_model.kernels(kv_format(tiny_model.config, None, cache)))
    print(*sorted(variant.name for variant in need), sep="\n")


# Replays.


def replays() -> None:
    """Replay graphs of a rank's share, and compare logits with other ranks' and the twin's."""
    import torch

    from ostinato.parallel import rank_here, start_ranks

    device = torch.device("cpu") if CPU else torch.device("cuda", rank_here())
    with start_ranks(device, timeout_s=60) as ranks:
        communicator = ranks.connect(device)
        say("rank", ranks.rank, "of", ranks.size, "sums by", type(communicator).__name__)
        for shape, cases in (
            (SHAPE, ((1, 10_000), (33, 10_000), (700, 1000))),
            (EXPERTS, ((1, 10_000), (33, 10_000))),
        ):
            model = random_share(shape, device, communicator)
            for tokens, times in cases:
                replay(ranks, shape, model, *((min(tokens, 5), 3) if CPU else (tokens, times)))
            texts(ranks, shape, model)


def random_share(shape: str, device: torch.device, communicator: Any) -> Decoder:
    """Return a rank's share of two layers, the same for a rank of other communicators."""
    from ostinato.bench.shapes import SHAPES
    from ostinato.bench.weights import random_decoder
    from ostinato.models import compile_kernels, read_config

    config = read_config({**SHAPES[shape], "num_hidden_layers": 2})

    model = random_decoder(
        config, "int8", device, max_context=MOST, lm_head="bf16", communicator=communicator
    )
    compile_kernels(model)
    return model


MOST = 32 if CPU else 2600  # tokens of a sequence


def replay(ranks: Ranks, shape: str, model: Decoder, length: int, times: int) -> None:
    """Replay a prompt's graph so many times, and keep a row of what changed."""
    import torch

    from ostinato.models import KVFormat, PagedKVCache
    from ostinato.models.scoring import sequence_inputs

    draw = random.Random(length)
    tokens = [draw.randrange(model.config.vocab_size) for _ in range(length)]
    cache = PagedKVCache.for_model(
        model.config,
        num_pages=2 + length // 16,
        page_size=16,
        device=model.device,
        l2_partitioned=False,
        kv_format=KVFormat(model.config.dtype),
    )
    changed = torch.zeros((), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        inputs = sequence_inputs(cache, tokens)
        expected = model(*inputs, cache).clone()
        again, captured = (lambda: None), expected
        if not CPU:
            stream = torch.cuda.Stream(model.device)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(model.device)
            with torch.cuda.stream(stream):
                model(*inputs, cache)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                captured = model(*inputs, cache)
            again = graph.replay
        began = time.perf_counter()
        for _ in range(times):
            again()
            changed += (captured.view(torch.int32) != expected.view(torch.int32)).sum()
        total = int(changed)
        seconds = time.perf_counter() - began
    ranks.check()
    digest = hashlib.sha256(expected.cpu().numpy().tobytes()).hexdigest()
    told = ranks.channel.meet(f"{length} tokens", [digest, total], timeout_s=120)
    if not ranks.leads:
        ranks.channel.meet("the twin", None, timeout_s=240)
        return
    twin = twin_logits(ranks.size, shape, model.device, tokens)
    same = [bool(torch.equal(each.to(expected.device), expected)) for each in twin]
    row: dict[str, Any] = {
        "section": "replays",
        "case": f"{shape} 2 layers tp{ranks.size} M{length}",
    }
    row |= {"impl": "ostinato_int8", "replays": times, "changed": sum(t for _, t in told)}
    row |= {"ranks_equal": len({d for d, _ in told}) == 1, "twin_equal": all(same)}
    row["us"] = round(seconds / times * 1e6, 1)
    keep("replays", row)
    ranks.channel.meet("the twin", None, timeout_s=240)


def twin_logits(
    size: int, shape: str, device: torch.device, tokens: list[int]
) -> list[torch.Tensor]:
    """Return the logits of ranks that are threads of this process, and share its device."""
    import torch
    from rank_models import launch_together, rank_logits

    from ostinato.ops.collective.communicator import local_communicators, run_ranks
    from ostinato.ops.collective.peers import local_peers

    if CPU:
        made = local_communicators(size, timeout_s=120)
    else:
        made = local_peers(size, device, timeout_s=60)
        launch_together(made)
    shares = run_ranks(made, lambda rank: random_share(shape, rank.device, rank))
    found = rank_logits(shares, tokens)
    if not CPU:
        torch.cuda.synchronize()
    return found


def texts(ranks: Ranks, shape: str, model: Decoder) -> None:
    """Have the engine replay its graphs, four sequences together and apart: the same tokens."""
    from ostinato.bench.engine import number_tokenizer
    from ostinato.engine import Engine, SamplingParams

    engine = Engine(
        model, number_tokenizer(model.config.vocab_size), max_batch=4, max_context=MOST, ranks=ranks
    )
    if not ranks.leads:
        engine.follow()
        return
    engine.capture([1, 4], progress=False)
    draw = random.Random(0)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(9)] for _ in range(4)]
    length = MOST - 16
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    began = time.perf_counter()
    together = [c.token_ids for c in engine.generate(prompts, params)]
    apart = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    seconds = time.perf_counter() - began
    row: dict[str, Any] = {"section": "replays", "case": f"{shape} 2 layers tp{ranks.size} texts"}
    row |= {"impl": "ostinato_int8", "replays": 5 * length, "verified": True}
    row |= {"texts_equal": sum(a == b for a, b in zip(together, apart, strict=True)), "texts": 4}
    row |= {"distinct_tokens": len(set(together[0])), "us": round(seconds / (5 * length) * 1e6, 1)}
    keep("replays", row)
    engine.close()


def keep(name: str, row: dict[str, Any]) -> None:
    """Add a row to those of a part, each in a line of its own."""
    say(json.dumps(row))
    with open(W / f"{name}.rows", "a") as file:
        print(json.dumps(row), file=file)


# Faults.


def faults(ranks: int) -> None:
    """Inject faults into engines on GPUs, several groups at a time."""
    from rank_forks import Forks
    from test_parallel_faults import problems, random_fault

    total = int(os.environ.get("FAULTS", "6" if CPU else "200"))
    seconds = float(os.environ.get("FAULTS_S", "190"))
    at_once = int(os.environ.get("AT_ONCE", "2" if CPU else "16"))
    device = "cpu" if CPU else "cuda"
    cases = [random_fault(random.Random(seed), [ranks], device) for seed in range(total)]
    reports: list[dict[str, Any]] = []
    wrong: list[str] = []
    (OUT / "faults.txt").write_text("")
    with closing(Forks(at_once)) as forks:
        alone = {"scenario": "serve", "size": 1, "alone": True, "device": device}
        first = forks.run(alone).result()["ranks"][0]
        if first["code"] != 0:
            raise SystemExit(first["stderr"])
        expected = first["told"][:-1]
        say(len(expected), "tokens alone")
        running: set[Future[dict[str, Any]]] = set()
        while cases or running:
            if time.time() - T0 > seconds:
                cases = []
            while cases and len(running) < at_once:
                running.add(forks.run(cases.pop(0)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for report in (future.result() for future in done):
                reports.append(report)
                found = problems(report, expected)
                wrong += found
                with open(OUT / "faults.txt", "a") as file:
                    print(*found, sep="\n\n", file=file) if found else None
                if found or len(reports) % 20 == 0:
                    say(len(reports), "faults", len(wrong), "wrong", *(w[:300] for w in found))
                keep_faults(ranks, reports, wrong)
    say("faults", len(reports), "wrong", len(wrong))


def keep_faults(ranks: int, reports: list[dict[str, Any]], wrong: list[str]) -> None:
    row: dict[str, Any] = {"section": "faults", "case": f"tp{ranks}", "impl": "ostinato"}
    row |= {"faults": len(reports), "problems": len(wrong)}
    row["hangs"] = sum("hangs" in problem.partition("\n")[0] for problem in wrong)
    row["longest_s"] = round(max(report["seconds"] for report in reports), 1)
    (W / "faults.rows").write_text(json.dumps(row) + "\n")


# vLLM.


def vllm(ranks: int) -> None:
    """Start vLLM on so many GPUs, wait for our parts to end, and time a step."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # and end vLLM's processes
    # They see its own packages, and not ours.
    os.environ["PYTHONPATH"] = os.environ["THEIRS"]
    from vllm_process import Engines, Variant

    from ostinato.bench.shapes import SHAPES

    folder = W / "vllm"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    tiny = json.loads((ROOT / "examples/tiny-llama/config.json").read_text())
    config = {
        **SHAPES["llama-3.1-70b"],
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": tiny["quantization_config"],
    }
    (folder / "model/config.json").write_text(json.dumps(config))
    arguments = {
        "model": str(folder / "model"),
        "load_format": "dummy",
        "worker_extension_cls": "vllm_weights.RandomWeights",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "generation_config": "vllm",
        "seed": 0,
        "max_model_len": 4096,
        "max_num_seqs": max(BATCHES),
        "kv_cache_memory_bytes": 6 * GIB,
        # Of what is free at the start: our parts beside it hold some.
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": "mp",
        "compilation_config": {"cudagraph_capture_sizes": sorted({1, 8, *BATCHES})},
    }
    alone = Variant("", {}, {"VLLM_PLUGINS": "", "TRITON_CACHE_DIR": str(folder / "triton")})
    times = {"start_seconds": 380.0, "ask_seconds": 90.0}
    with Engines([alone], arguments, folder, **times) as engines:
        if not engines.running():
            raise SystemExit("vLLM did not start")
        ready = engines.ready(alone)
        say("ready", json.dumps(ready))
        filled = engines.ask(alone, "on_workers", method="fill_randomly")
        say("weights", filled)
        while not (W / "go").exists():
            time.sleep(0.2)
        for batch in BATCHES:
            given = {"batch": batch, "prompt": PROMPT, "vocab": config["vocab_size"], "same": False}
            engines.ask(alone, "step", **given, counts=(COUNTS[0], COUNTS[0] + 1))
            answers = [engines.ask(alone, "step", **given, counts=COUNTS) for _ in range(REPEATS)]
            if None in answers:
                raise SystemExit("vLLM ended")
            short, long = zip(*(answer["seconds"] for answer in answers), strict=True)
            seconds = statistics.median(long) - statistics.median(short)
            row: dict[str, Any] = {"section": "engine", "impl": f"vllm_{ready['vllm']}_int8"}
            row["case"] = f"{SHAPE} tp{ranks} b{batch} prompt{PROMPT}"
            row |= {"us": round(seconds / (COUNTS[1] - COUNTS[0]) * 1e6, 1)}
            row |= {"weights": "random" if filled else "dummy"}
            row |= {"short_s": [round(s, 4) for s in short], "long_s": [round(s, 4) for s in long]}
            keep("vllm", row)
        say("start", ready["seconds"], "s")


def join() -> None:
    """Write engine_tp.json of all rows that there are, ours beside vLLM's."""
    ours: list[dict[str, Any]] = []
    head: dict[str, Any] = {}
    if (W / "engine.json").is_file():
        head = json.loads((W / "engine.json").read_text())
        ours = head.pop("rows")
    rows = {
        name: [json.loads(line) for line in (W / f"{name}.rows").read_text().splitlines()]
        for name in ("vllm", "replays", "faults")
        if (W / f"{name}.rows").is_file()
    }
    theirs = rows.pop("vllm", [])
    known = {row["case"]: row for row in theirs}
    for row in ours:
        peer = known.get(row["case"]) if row["section"] == "engine" else None
        if peer is not None:
            row |= {"peer": peer["impl"], "ratio": round(row["us"] / peer["us"], 4)}
            say(row["case"], row["us"], "us,", row["ratio"], "of", peer["impl"], peer["us"])
    versions = {"vllm": theirs[0]["impl"].split("_")[1]} if theirs else {}
    if head:
        head["versions"] |= versions
    found = [*ours, *theirs, *(row for part in rows.values() for row in part)]
    if found:
        write(OUT / "engine_tp.json", head or document(versions), found)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    W.mkdir(parents=True, exist_ok=True)
    part, *rest = sys.argv[1:]
    given = [int(each) for each in rest]
    parts = {"count": count, "kernels": kernels, "engine_flags": engine_flags, "join": join}
    parts |= {"replays": replays, "faults": faults, "vllm": vllm}
    parts[part](*given)


if __name__ == "__main__":
    main()
