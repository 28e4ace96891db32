"""Times an MLP of one INT8 token as two launches instead of three, and CTAs that share SMs.

    python try_silu1/run.py PART [--budget-s N] [--models NAME ...] [--modes MODE ...] [--rounds N]

PART is one of
    bits   compares every mode with three launches, bit by bit, at the sizes of the models   (30 s)
    mlp    us of an MLP behind its norm, in a CUDA graph of eight with weights of their own  (60 s)
    step   us of captured decode steps, batch 1, context 512, 16-bit head                    (90 s)
    kernels   adds what each kernel of a step of the first model adds, mode by mode          (30 s)
Times are without compiling: the first part compiles what its modes launch, side by side, about 12 s
of a core for each of the 4 to 6 kernels of a mode and a size of K. Rows are printed as they come,
and go to $OUT/silu1_PART.jsonl. In a round each mode is timed once, in turn; what counts is the
median over the rounds, and the table at the end has each beside the base.

A mode is MLP+TRIAL: MLP is `three` (norm and gate_up, SiLU and quantiser, down) or `two` launches;
TRIAL is one of trials.py. `three+alone` is the base, what main does; `two+alone` is the branch. The
others try CTAs of one launch beside those of the next on an SM (docs/notebooks/decode_step.md).

Decided like this: `two` stays if two+alone takes 30 us less of Qwen3-8B's step than three+alone, or
if it takes less of every model's; a trial is worth a change of the kernels if it takes 1% less of
all steps than two+alone. `step` prints these decisions last. FP8 is not here: its layers of one token
are tiles with a quantiser before each, which the op leaves as they are. OSTINATO_SILU1_CPU=1 tries the script with tiny shapes on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ostinato import ops
from ostinato.bench.shapes import SHAPES
from ostinato.bench.step import run as step_run
from ostinato.bench.step.breakdown import trace
from ostinato.bench.timing import time_calls
from ostinato.bench.weights import random_decoder
from ostinato.engine.decode_step import DecodeStep, SeenTokens
from ostinato.graphs import GraphRunner, StaticBuffers
from ostinato.jit import compiler, loader
from ostinato.jit.variant import Variant
from ostinato.models import PagedKVCache, read_config
from ostinato.ops.linear import fused, fused_cuda
from ostinato.ops.linear.precompile import precompile

sys.path.insert(0, str(Path(__file__).parent))
from trials import TRIALS, kernels_of  # noqa: E402

CPU = os.environ.get("OSTINATO_SILU1_CPU") == "1"
DEVICE = torch.device("cpu") if CPU else torch.device("cuda", 0)
OUT = Path(os.environ.get("OUT", "."))
MODELS = ("qwen3-8b", "llama-3.1-8b", "phi-4", "mistral-small-3.1", "gemma-3-27b")
MODES = (
    *("three+alone", "two+alone", "two+slots4", "two+slot", "two+turns", "two+turns_late"),
    *("two+equal", "two+equal_late"),
)
BASE = MODES[0]
T0 = time.time()
_launch_gated = fused.launch_gated
_ROWS: list[Any] = []


def say(part: str, **row: Any) -> None:
    text = json.dumps({"section": f"silu1_{part}", **row, "t": round(time.time() - T0, 1)})
    print(text, flush=True)
    if not _ROWS:
        _ROWS.append(open(OUT / f"silu1_{part}.jsonl", "w"))  # noqa: SIM115
    _ROWS[0].write(text + "\n")
    _ROWS[0].flush()


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """Have the op launch the kernels of a mode."""
    mlp, trial = name.split("+")

    def load(variant: Variant, *, device: int, stream: int) -> Any:
        return loader.load(kernels_of(variant, trial), device=device, stream=stream)

    fused_cuda.load = load
    fused.launch_gated = _launch_gated if mlp == "two" else lambda *given: False
    try:
        yield
    finally:
        fused_cuda.load, fused.launch_gated = loader.load, _launch_gated


def compile_all(variants: list[Variant], modes: list[str]) -> list[str]:
    """Compile what the modes launch; return the modes whose kernels could be."""
    if CPU:
        return modes
    # Prompts and batches are not timed; what is launched all the same is compiled then.
    variants = [
        v
        for v in variants
        if v.family != "attention_prefill" and not (v.family == "gemm_tiled" and v.dtype == "int8")
    ]
    precompile(variants)
    good = []
    for name in modes:
        wanted = dict.fromkeys(kernels_of(v, name.split("+")[1]) for v in variants)
        plans = [compiler.plan(v) for v in wanted if v not in variants]
        try:
            for entry in compiler.build([p for p in plans if compiler.find(p) is None]):
                print(entry.variant, entry.usage, flush=True)
            good.append(name)
        except Exception as error:  # one trial less
            print(f"{name}: {str(error)[-500:]}", flush=True)
    return good


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return us of each call, once a round: the median of ten back to back."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        order = list(calls) if turn % 2 == 0 else list(reversed(calls))
        for name in order:
            seconds = time_calls(calls[name], DEVICE, repeats=10, warmup=2)
            times[name].append(statistics.median(seconds) * 1e6)
    return times


def table(part: str, case: str, times: dict[str, list[float]], each: int, floor: float) -> None:
    """Print and keep the medians, per layer as well, beside the base's."""
    base = statistics.median(times[BASE]) if BASE in times else math.nan
    print(f"{case}: floor {floor:.1f} us", flush=True)
    for name, of_mode in times.items():
        us, spread = statistics.median(of_mode), max(of_mode) - min(of_mode)
        print(
            f"  {name:<18}{us:10.1f} us{us - base:+9.1f}  {us / base:7.4f}  {(us - base) / each:+7.2f}"
            f" a layer  floor {floor / us:6.1%}  spread {spread:.1f}",
            flush=True,
        )
        say(part, case=case, mode=name, us=round(us, 2), base_us=round(base, 2), layers=each,
            floor_us=round(floor, 2), spread_us=round(spread, 2))  # fmt: skip


class MLP:
    """Operands of an MLP of a model's shape."""

    def __init__(self, shape: dict[str, Any], seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        hidden, width = shape["hidden_size"], shape["intermediate_size"]
        gemma = shape["model_type"].startswith("gemma")
        self.kind = "gelu_tanh_mul" if gemma else "silu_mul"

        def weight(n: int, k: int) -> tuple[Any, torch.Tensor]:
            w = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=DEVICE, generator=generator)
            scale = torch.rand(n, device=DEVICE, generator=generator) / 64 / k**0.5 + 0.005 / k**0.5
            return (w if CPU else ops.pack_weight(w)), scale

        self.gate_up, self.down = weight(2 * width, hidden), weight(hidden, width)
        self.norm = torch.rand(hidden, device=DEVICE, generator=generator) + 0.5
        self.norm = self.norm if gemma else self.norm.bfloat16()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.rms_norm_w8a8_mlp(
            *(x, self.norm, 1e-5, *self.gate_up, *self.down, self.kind), residual=residual
        )

    def kernels(self) -> list[Variant]:
        """Return what it launches for one token, in three launches and in two."""
        from ostinato.ops.linear.precompile import gated_kernels, layer_kernels

        shapes = [w.shape for w, _ in (self.gate_up, self.down)]
        norm = "rms_norm" if self.norm.dtype is torch.bfloat16 else "rms_norm_fp32"
        found: list[Variant] = []
        for kind, shape in zip((norm, self.kind), shapes, strict=True):
            found += layer_kernels(kind, tuple(shape), torch.int8, torch.bfloat16)
        return list(dict.fromkeys([*found, *gated_kernels(self.kind, found)]))


def shape_of(name: str) -> dict[str, Any]:
    shape = SHAPES["tiny" if CPU else name]
    return {**shape, **({"intermediate_size": 144} if CPU else {})}


def bits(args: argparse.Namespace) -> None:
    for name in args.models:
        mlp = MLP(shape_of(name), 1)
        good = compile_all(mlp.kernels(), args.modes)
        hidden = shape_of(name)["hidden_size"]
        wrong = dict.fromkeys(good, 0)
        for seed in range(args.rounds):
            torch.manual_seed(seed)
            x, residual = (torch.randn(1, hidden, device=DEVICE).bfloat16() for _ in range(2))
            if seed == 1:
                x[0, 3] = torch.nan
            with mode(BASE):
                want = mlp(x, residual)
            for each in good:
                with mode(each):
                    got = mlp(x, residual)
                same = all(torch.equal(a.view(torch.int16), b.view(torch.int16))
                           for a, b in zip(got, want, strict=True))  # fmt: skip
                wrong[each] += not same
        say("bits", case=name, rounds=args.rounds, differ=wrong)
        assert not any(wrong.values()), wrong
        del mlp


def mlp(args: argparse.Namespace) -> None:
    layers = 8
    for name in args.models:
        shape = shape_of(name)
        mlps = [MLP(shape, seed) for seed in range(layers)]
        good = compile_all(mlps[0].kernels(), args.modes)
        start = torch.randn(1, shape["hidden_size"], device=DEVICE).bfloat16()

        def chain(mlps: list[MLP] = mlps, start: torch.Tensor = start) -> torch.Tensor:
            y, total = start, torch.zeros_like(start)
            for each in mlps:
                y, total = each(y, total)
            return y

        calls: dict[str, Callable[[], object]] = {}
        for each in good:
            with mode(each):
                chain()
                calls[each] = chain if CPU else captured(chain)
        num_bytes = layers * 3 * shape["hidden_size"] * shape["intermediate_size"]
        table("mlp", name, in_turn(calls, args.rounds), layers, num_bytes / 4.5e6)
        del mlps, calls, chain
        forget()


def captured(call: Callable[[], object]) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def forget() -> None:
    gc.collect()
    if not CPU:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def steps(name: str, modes: list[str]) -> Iterator[tuple[Any, dict[str, Callable[[], object]]]]:
    """Make a model; yield it and a replay of each mode's captured step."""
    config = read_config(SHAPES["tiny" if CPU else name])
    model = random_decoder(config, "int8", DEVICE, max_context=1024, lm_head="bf16")
    plan = step_run.StepPlan(batches=(1,), contexts=(512,))
    good = compile_all(list(dict.fromkeys(model.kernels())), modes)
    pages_each = -(-512 // plan.page_size)
    calls: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack:
        for each in good:
            cache = PagedKVCache.for_model(
                config, num_pages=1 + pages_each, page_size=plan.page_size, device=DEVICE
            )
            cache.randomize()
            step = DecodeStep(
                model, cache, SeenTokens(1, config.vocab_size, DEVICE), max_pages=pages_each
            )
            specs = step.buffer_specs()
            buffers = StaticBuffers(specs, 1, DEVICE)
            runner = stack.enter_context(GraphRunner(step, buffers, memory=step.memory()))
            with mode(each):
                runner.capture([1], progress=False, verify=False)
            inputs = {
                key: tensor.to(specs[key].dtype)
                for key, tensor in step_run.step_inputs(cache, model, 1, 512, plan).items()
            }
            calls[each] = partial(runner.run, 1, inputs)
        yield model, calls


def floor_of(model: Any) -> float:
    if CPU:
        return 1.0
    roofline = step_run.roofline_of(model.device)
    cache_format = step_run.StepPlan(batches=(1,), contexts=(512,)).cache_format(model)
    found = step_run.kernel_rooflines(model, 1, 512, roofline, cache_format)
    return step_run.step_roofline(found) * 1e6


def decide(found: dict[str, dict[str, float]]) -> None:
    """Say what stays, of the medians of each model's step, by mode."""
    two, three = "two+alone", BASE
    gains = {case: us[three] - us[two] for case, us in found.items() if two in us}
    qwen = gains.get("qwen3-8b", math.nan)
    stays = qwen >= 30 or (bool(gains) and min(gains.values()) > 0)
    say("step", decision="two launches", stays=stays, saves_us={c: round(g, 1) for c, g in gains.items()})
    for trial in sorted({mode for us in found.values() for mode in us} - {two, three}):
        ratios = {case: us[trial] / us[two] for case, us in found.items() if {trial, two} <= set(us)}
        worth = bool(ratios) and max(ratios.values()) <= 0.99
        say("step", decision=trial, stays=worth, of_two_alone={c: round(r, 4) for c, r in ratios.items()})


def step(args: argparse.Namespace) -> None:
    found: dict[str, dict[str, float]] = {}
    for name in args.models:
        if time.time() - T0 > args.budget_s:
            print(f"{name}: out of time", flush=True)
            break
        with steps(name, args.modes) as (model, calls):
            times = in_turn(calls, args.rounds)
            table("step", name, times, model.config.num_layers, floor_of(model))
            found[name] = {each: statistics.median(of_mode) for each, of_mode in times.items()}
        del model, calls
        forget()
    decide(found)


def kernels(args: argparse.Namespace) -> None:
    name = args.models[0]
    with steps(name, args.modes) as (model, calls):
        layers = model.config.num_layers
        for each, call in calls.items():
            call()
            if CPU:
                continue
            runs = trace(call)
            names = [span.name for span in runs[0]]
            shares = step_run.shares_of(runs, names)
            for share in shares:
                say("kernels", case=name, mode=each, kernel=share.name, launches=share.launches,
                    added_us=round(share.added_us, 1), running_us=round(share.running_us, 1),
                    a_layer=round(share.added_us / layers, 2))  # fmt: skip
            # One layer from the middle, in the order of its launches: when each began and ended.
            attentions = [i for i, kernel in enumerate(names) if kernel == "paged_decode"]
            first, last = attentions[layers // 2], attentions[layers // 2 + 1]
            begin = runs[-1][first].begin
            for span in runs[-1][first : last + 1]:
                print(f"  {each:<18}{span.begin - begin:9.2f} to{span.end - begin:9.2f}  {span.name}")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "bits": bits,
    "mlp": mlp,
    "step": step,
    "kernels": kernels,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for name in args.modes:
        how, _, trial = name.partition("+")
        if how not in ("two", "three") or trial not in TRIALS:
            parser.error(f"--modes: got {name!r}, expected three or two, + and one of {list(TRIALS)}")
    if BASE not in args.modes:
        args.modes.insert(0, BASE)
    PARTS[args.part](args)


if __name__ == "__main__":
    main()
