"""Times and checks mixtures of experts on one GPU, beside vLLM's; one part of it a process.

    python tests/gpu_runs/experts/run.py PART [ARGUMENTS]

run.sh starts the parts in their order, with the paths that each needs. The working directory is
the repository's root. Parts:

    bench      `bench moe`: blocks of experts beside vLLM's Triton kernels and DeepGEMM
    engine     `bench engine` of Qwen3-30B-A3B and Mixtral-8x7B, with random weights
    padding    `bench step` of batches in a CUDA graph of their size and in a larger one
    replays    whether replays of a graph, and tokens beside others, change any bit
    sanitized  blocks of every precision, checked; to be run under compute-sanitizer
    warm       NAME SHAPE TOKENS...: compiles what the peer NAME needs for these numbers of tokens
    warm_list  prints the arguments of every `warm` that `bench` profits from
    kernels    prints the names of our kernels that the parts launch; needs no GPU

`bench` and `warm` need vLLM on PYTHONPATH and sglang-kernel's library, which OSTINATO_SGL_LIBRARY
names; without the latter vLLM routes the tokens. Our kernels come from OSTINATO_CACHE and are
compiled at their first launch if they are not there. Results go to OUT, documents of single runs
to MOE_WORK. MOE_BENCH names the groups of precisions that `bench` is to time (default: all).
MOE_CPU=1 tries most parts with tiny shapes on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

OUT = Path(os.environ.get("OUT", "/tmp/moe_out"))
WORK = Path(os.environ.get("MOE_WORK", "/tmp/moe_work"))
CPU = os.environ.get("MOE_CPU") == "1"  # a trial of this script with tiny shapes
DEVICE = ["--device", "cpu"] if CPU else []
QWEN, MIXTRAL = "E128 k8 H2048 I768", "E8 k2 H4096 I14336"
if CPU:
    QWEN, MIXTRAL = "E16 k4 H32 I24", "E4 k2 H32 I40"
T0 = time.time()


def cases(shape: str, routing: str, *tokens: int) -> list[str]:
    return [f"{shape} M{m} {routing}" for m in tokens]


# NAME, precisions, budget in seconds, cases. The most important come first: a budget that ends
# cuts off the last.
BENCH: tuple[tuple[str, list[str], int, list[str]], ...] = (
    (
        "int8_fp8",
        ["int8", "fp8"],
        85,
        [
            *cases(QWEN, "balanced", 1, 8, 32, 128, 2048, 4, 2, 16, 64, 8192),
            *cases(QWEN, "skewed", 32, 128, 8, 2048),
            *cases(MIXTRAL, "balanced", 1, 8, 32, 128, 2048),
            *cases(QWEN, "one", 8, 128),
        ],
    ),
    (
        "block",
        ["fp8-block"],
        32,
        [
            *cases(QWEN, "balanced", 1, 8, 32, 128, 2048, 4, 8192),
            *cases(QWEN, "skewed", 32),
            *cases(MIXTRAL, "balanced", 8, 128),
        ],
    ),
    (
        "bf16",
        ["bf16"],
        22,
        [*cases(QWEN, "balanced", 1, 8, 32, 128, 2048), *cases(MIXTRAL, "balanced", 8)],
    ),
)
if CPU:
    BENCH = tuple((name, dtypes, s, found[:2]) for name, dtypes, s, found in BENCH)


def say(*words: object) -> None:
    print(f"[{time.time() - T0:6.1f}]", *words, flush=True)


def merge(out: Path, files: list[Path], versions: dict[str, str]) -> None:
    """Write the rows of documents, those of which there are any, into one."""
    found = [json.loads(file.read_text()) for file in files if file.is_file()]
    if not found:
        say("nothing to merge into", out)
        return
    head = found[0]
    for one in found:
        assert one["gpu"] == head["gpu"]
        assert one["commit"] == head["commit"]
        versions = {**one["versions"], **versions}
    rows = ",\n".join("  " + json.dumps(row) for one in found for row in one["rows"])
    text = f'{{\n"gpu": {json.dumps(head["gpu"])},\n"versions": {json.dumps(versions)},\n'
    text += f'"commit": {json.dumps(head["commit"])},\n"rows": [\n{rows}\n]\n}}\n'
    out.write_text(text)
    say(out, "has", sum(len(one["rows"]) for one in found), "rows")


def routing() -> str:
    """Return whose top-k routes vLLM's tokens: sglang-kernel's, where it loads and runs."""
    import torch

    from ostinato.bench.harness.peers import load_adapter

    try:
        adapter = load_adapter(Path("examples/bench_peers/sgl_kernel.py"))
        adapter.load_sgl(os.environ.get("OSTINATO_SGL_LIBRARY"))
        logits = torch.randn(3, 128, device="cuda").bfloat16()
        weights = torch.empty(3, 8, device="cuda")
        ids = torch.empty(3, 8, dtype=torch.int32, device="cuda")
        torch.ops.sgl_kernel.topk_softmax(weights, ids, logits, True, 0.0, None)
        expected = logits.float().softmax(1).topk(8).values
        expected /= expected.sum(1, keepdim=True)
        assert (weights - expected).abs().max().item() < 1e-3
        return "sglang"
    except Exception as error:
        say("sglang-kernel's topk_softmax does not serve, vLLM's does:", repr(error)[:300])
        return "vllm"


def bench() -> None:
    """`bench moe`, a document for each group of precisions, then one of all."""
    from ostinato.cli.main import main

    which = "none" if CPU else routing()
    os.environ["OSTINATO_MOE_ROUTING"] = which
    only = os.environ.get("MOE_BENCH", "").split()
    files = []
    for name, dtypes, budget, found in BENCH:
        if only and name not in only:
            continue
        file = WORK / f"moe_{name}.json"
        flags = ["bench", "moe", "--dtype", *dtypes, "--budget-s", str(budget), *DEVICE]
        say("bench", name, "exit code", main([*flags, "--cases", *found, "--json", str(file)]))
        files.append(file)
        versions = {"vllm_routing": "sglang-kernel 0.4.6" if which == "sglang" else which}
        versions["deep_gemm"] = "2.8.1, of vllm"
        merge(OUT / "moe.json", files, versions)


def engine() -> None:
    """`bench engine` of both models, a document for each, then one with the steps of `padding`."""
    from ostinato.cli.main import main

    runs = (
        ("qwen_int8", "qwen3-30b-a3b", "int8", "3"),
        ("qwen_fp8", "qwen3-30b-a3b", "fp8", "3"),
        ("mixtral_int8", "mixtral-8x7b", "int8", "2"),
    )
    for name, shape, dtype, repeats in runs:
        flags = ["--shape", shape, "--batch", "1", "32", "--dtype", dtype, "--lm-head", dtype]
        if CPU:
            flags = ["--shape", "tiny-moe", "--batch", "1", "2", "--dtype", dtype, *DEVICE]
            flags += ["--prompt", "8", "--output", "4", "40"]
        file = WORK / f"engine_{name}.json"
        code = main(["bench", "engine", *flags, "--repeats", repeats, "--json", str(file)])
        say("engine", name, "exit code", code)
        merge_engine()


def padding() -> None:
    """`bench step` of 33 sequences in a graph of 33 and in one of 64; of 1 and 32, too."""
    from ostinato.cli.main import main

    shape, sizes = "qwen3-30b-a3b", ["--batch", "1", "32", "33", "--padded", "64"]
    if CPU:
        shape, sizes = "tiny-moe", ["--batch", "3", "--padded", "5", "--context", "9"]
    flags = ["--shape", shape, "--dtype", "int8", "--lm-head", "int8", *sizes, *DEVICE]
    file = WORK / "padding.json"
    say("padding exit code", main(["bench", "step", *flags, "--json", str(file)]))
    rows = {row["case"]: row["us"] for row in json.loads(file.read_text())["rows"]}
    for case, us in rows.items():
        if case.rpartition(" in")[0] in rows:
            say(case, "over the exact graph:", round(us / rows[case.rpartition(" in")[0]], 4))
    merge_engine()


def merge_engine() -> None:
    names = ("engine_qwen_int8", "engine_qwen_fp8", "engine_mixtral_int8", "padding", "replays")
    merge(OUT / "engine_moe.json", [WORK / f"{name}.json" for name in names], {})


def replays() -> None:
    """10,000 replays of a block of Qwen3-30B-A3B's shape, and 300 routings, none a bit changed."""
    import torch

    from ostinato.bench.moe.cases import Case
    from ostinato.bench.moe.inputs import random_inputs
    from ostinato.bench.report import Report

    device = torch.device("cpu" if CPU else "cuda")
    report = Report.for_device(device)
    for precision in ("int8", "fp8", "fp8-block", "bf16"):
        case = Case.parse(f"{QWEN} M33 skewed")
        one = random_inputs(case, precision, device)[0]
        mixture: Any = one.weights.mixture
        config = one.config
        n_active = torch.full((1,), 33, dtype=torch.int32, device=device)
        expected = mixture(one.x, config, n_active).clone()
        changed = torch.zeros((), dtype=torch.int64, device=device)
        if CPU:
            replay, captured = (lambda: None), expected
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = mixture(one.x, config, n_active)
            replay = graph.replay
        count = 10_000 if not CPU else 3
        for _ in range(count):
            replay()
            changed += (captured != expected).sum()
        generator = torch.Generator(device).manual_seed(0)
        for turn in range(300 if not CPU else 3):
            one.x.normal_(generator=generator)
            if turn % 3 == 1:  # all tokens to the same experts, all others empty
                one.x[:, : config.num_experts] = one.x[0, : config.num_experts].clone()
            active = 33 if turn % 2 else 1 + turn % 33
            n_active.fill_(active)
            replay()
            got = captured if not CPU else mixture(one.x, config, n_active)
            changed += (got[:active] != mixture(one.x[:active].clone(), config)).sum()
        name = f"ostinato_{precision.replace('-', '_')}"
        row: dict[str, Any] = {"section": "moe_replays", "case": str(case), "impl": name}
        row |= {"replays": count, "routings": 300, "changed": int(changed)}
        report.rows.append(row)
        report.write(WORK / "replays.json")
        say(*row.items())
    merge_engine()


def sanitized() -> None:
    """What runs under compute-sanitizer: blocks of every precision with few and many tokens."""
    import torch

    from ostinato.bench.moe.cases import Case, Shape
    from ostinato.bench.moe.check import CHECK
    from ostinato.bench.moe.inputs import random_inputs

    device = torch.device("cpu" if CPU else "cuda")
    shape = Shape(experts=24, top_k=4, hidden=208, intermediate=72)
    for precision in ("int8", "fp8-block", "bf16", "fp8"):
        for m in (1, 33, 200):
            one = random_inputs(Case(shape, m, "skewed"), precision, device)[0]
            active = torch.full((1,), m, dtype=torch.int32, device=device)
            mixture: Any = one.weights.mixture
            got = mixture(one.x, one.config, active)
            wrong = CHECK.wrong(got, Case(shape, m, "skewed"), one)
            say(precision, m, "right" if wrong is None else wrong)


def warm(name: str, shape: str, tokens: list[int]) -> None:
    """Compile what a peer needs for these numbers of tokens: its caches are on the disk."""
    import torch

    from ostinato.bench.harness.peers import load_adapter
    from ostinato.bench.moe.cases import Case
    from ostinato.bench.moe.inputs import Inputs, random_weights
    from ostinato.models.experts.config import ExpertsConfig

    os.environ["OSTINATO_MOE_ROUTING"] = routing()
    adapter = load_adapter(Path("examples/bench_peers/vllm_moe.py"))
    (impl,) = [one for one in adapter.peers("moe", os.environ) if one.name == name]
    impl.prepare()
    of = Case.parse(f"{shape} M1 one").shape
    weights = random_weights(of, impl.layout, torch.device("cuda"))
    config = ExpertsConfig(of.experts, of.top_k, of.intermediate, (True,))
    for m in tokens:
        x = torch.randn(m, of.hidden, device="cuda").bfloat16()
        ids = torch.zeros(m, of.top_k, dtype=torch.int64, device="cuda")
        inputs = Inputs(x, weights, config, ids, torch.empty_like(x))
        try:
            impl.bind(Case(of, m, "balanced"), [inputs])
            torch.cuda.synchronize()
            say(name, shape, m, "ready")
        except (RuntimeError, ValueError, OSError) as error:
            say(name, shape, m, "cannot:", str(error)[:300])


def warm_list() -> None:
    """Print the arguments of each process of `warm`."""
    tokens: dict[tuple[str, str], list[int]] = {}
    peers = {"int8": ["vllm_i8"], "fp8": ["vllm_f8", "vllm_f8t"], "bf16": ["vllm_bf16"]}
    peers["fp8-block"] = ["vllm_blk", "vllm_dg"]
    for _, dtypes, _, found in BENCH:
        for case in found:
            shape, _, rest = case.partition(" M")
            m = int(rest.split()[0])
            for name in (each for dtype in dtypes for each in peers[dtype]):
                if name == "vllm_f8t" and shape == MIXTRAL:
                    continue  # which has a file of its own
                known = tokens.setdefault((name, shape), [])
                known += [m] if m not in known else []
    for (name, shape), counts in sorted(
        tokens.items(), key=lambda one: (one[0][0] != "vllm_dg", one)
    ):
        step = 1 if name == "vllm_dg" else 6
        for first in range(0, len(counts), step):
            print(f"{name}|{shape}|{' '.join(map(str, counts[first : first + step]))}")


def kernels() -> None:
    """Print the names of all kernels of ours that the parts launch; needs no GPU."""
    import torch
    from hollow_weights import Hollow

    from ostinato.bench.shapes import SHAPES
    from ostinato.jit.variant import Variant
    from ostinato.models import DenseLinear, family_of, read_config
    from ostinato.models.experts.products import experts_kernels
    from ostinato.ops.linear.quantize_cuda import input_kernel
    from ostinato.ops.moe.combine_cuda import MoeCombine
    from ostinato.ops.moe.route_cuda import MoeRoute

    cpu, bf16, fp8 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn

    need: set[Variant] = {MoeRoute(dtype="fp32"), MoeCombine(dtype="bf16")}
    # Of torch's grouped products in FP8 and bf16, between kernels of ours.
    need |= {input_kernel("per_token", bf16, fp8, 0), input_kernel("silu_mul", bf16, fp8, 0)}
    need.add(input_kernel("silu_mul", bf16, bf16, 0))
    for dtype in (torch.int8, fp8, bf16):
        need |= set(experts_kernels(dtype, bf16, bf16))
    need |= set(experts_kernels(fp8, bf16, bf16, scale_channels=(8, 128)))
    for shape in ((128, 2048), (8, 4096), (24, 208)):
        router = DenseLinear(torch.empty(shape, dtype=bf16), out_dtype=torch.float32)
        need |= set(router.kernels("per_token", bf16))
    for name in ("qwen3-30b-a3b", "mixtral-8x7b"):
        config = read_config({**SHAPES[name], "num_hidden_layers": 1})
        for precision in ("int8", "fp8"):
            family, loader = family_of(config), Hollow(cpu, precision, precision, True, None)
            model = family.load(
                config, family.layout(config), loader, max_context=1024, batch_invariant=True
            )
            need |= set(model.kernels())
    print(*sorted(variant.name for variant in need), sep="\n")


if __name__ == "__main__":
    WORK.mkdir(parents=True, exist_ok=True)
    OUT.mkdir(parents=True, exist_ok=True)
    part, *rest = sys.argv[1:]
    if part == "warm":
        warm(rest[0], rest[1], [int(m) for m in rest[2:]])
    else:
        globals()[part]()
