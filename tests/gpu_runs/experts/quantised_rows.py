"""Times blocks of experts whose products quantise their rows beside ones with launches for that.

    python tests/gpu_runs/experts/quantised_rows.py [--precisions P ...] [--tokens N ...] [--trace]
        [--routing balanced|skewed|one]

Every block has all its launches in a CUDA graph, over input sets that the L2 does not hold, and the
ways take turns in one process (`ostinato.bench.harness.rotation`):

    launches  rows are quantised by launches of their own
    both      both products quantise rows of every tile of 8
    tree      what the tree does: both, up to QUANTIZED_ROWS of an expert on average

A row per precision and number of tokens goes to OUT/quantised_rows.json as it is measured, and the
table to stdout, with whether all ways gave the same bits for every input set. At the end: where
another way takes 1% less than the tree's. The exit code is 1 where bits differ.

Takes 30 s once its kernels are compiled, with --trace 10 s more: what each kernel adds to a block
at 1, 4 and 16 tokens. It compiles them side by side first: 9 of moe_linear (5 s each on one
core), 3 of quantize, moe_route, moe_combine and a few of gemm_tiled. OUT is /tmp/moe_out by
default. MOE_CPU=1 tries all but the trace with a tiny shape on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ostinato.bench.harness.rotation import interleave, rotate
from ostinato.bench.moe.cases import Case, Shape
from ostinato.bench.moe.inputs import Inputs, random_inputs, random_weights
from ostinato.bench.step.breakdown import shares_of, trace
from ostinato.models import DenseLinear
from ostinato.models.experts.products import experts_kernels
from ostinato.models.norms import summed
from ostinato.ops.linear.precompile import precompile
from ostinato.ops.moe import moe_linear_cuda
from ostinato.ops.moe.combine_cuda import MoeCombine
from ostinato.ops.moe.moe_linear_cuda import QUANTIZED_TILE, MoeLinear
from ostinato.ops.moe.plan import tile_tokens_for
from ostinato.ops.moe.route_cuda import MoeRoute

CPU = os.environ.get("MOE_CPU") == "1"
OUT = Path(os.environ.get("OUT", "/tmp/moe_out"))
SHAPE = Shape(16, 4, 32, 24) if CPU else Shape(128, 8, 2048, 768)
# Rows of an expert, on average, up to which products quantise them.
TREE = moe_linear_cuda.QUANTIZED_ROWS
WAYS = {"launches": 0, "both": QUANTIZED_TILE, "tree": TREE}
PRECISIONS = ("fp8-block", "int8", "fp8")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_TILE = 16  # of 128 tokens
T0 = time.time()


def say(*words: object) -> None:
    print(f"[{time.time() - T0:6.1f}]", *words, flush=True)


def block(way: str, s: Inputs) -> torch.Tensor:
    """Return the sums of a block; which products quantise is decided as they are launched."""
    moe_linear_cuda.QUANTIZED_ROWS = WAYS[way]
    return summed(s.weights.mixture(s.x, s.config))


def same_bits(sets: list[Inputs]) -> bool:
    """Return whether all ways give the same bits for every set, with a row that is no number."""
    for s in sets:
        x = s.x.clone()
        s.x[-1, -1] = torch.nan
        results = [block(way, s).view(torch.int16) for way in WAYS]
        s.x.copy_(x)
        results += [block(way, s).view(torch.int16) for way in WAYS]
        for i, got in enumerate(results):
            if not torch.equal(got, results[i // len(WAYS) * len(WAYS)]):
                return False
    return True


def compile_kernels() -> None:
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    need: list[Any] = [MoeRoute(dtype="fp32"), MoeCombine(dtype="bf16")]
    for dtype, channels in ((torch.int8, ()), (fp8, ()), (fp8, (128,))):
        need += experts_kernels(dtype, bf16, bf16, scale_channels=channels)
    router = DenseLinear(
        torch.empty(SHAPE.experts, SHAPE.hidden, dtype=bf16), out_dtype=torch.float32
    )
    need += router.kernels("per_token", bf16)
    precompile([v for v in need if not isinstance(v, MoeLinear) or v.tokens <= MOST_TILE])
    say(len(need), "kernels are there")


def traced(sets: list[Inputs], tokens: int, precision: str) -> None:
    """Print what each kernel adds to a block, in microseconds."""
    for way in WAYS:
        run: Callable[[], object] = rotate([partial(block, way, s) for s in sets], DEVICE).replay
        runs = trace(run)
        names = [span.name for span in runs[0]]
        blocks = max(1, names.count("moe_combine"))
        parts = [f"{s.name} {s.added_us / blocks:.2f}" for s in shares_of(runs, names)]
        say("trace", precision, tokens, way, f"{len(names) / blocks:.1f} kernels:", *parts)


DEVICE = torch.device("cpu" if CPU else "cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--routing", default="balanced", choices=("balanced", "skewed", "one"))
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if not CPU:
        compile_kernels()
    for precision in given.precisions:
        weights = [random_weights(SHAPE, precision, DEVICE) for _ in range(2)]
        for turn, tokens in enumerate(given.tokens):
            case = Case(SHAPE, tokens, given.routing)
            sets = list(random_inputs(case, precision, DEVICE, weights))
            row: dict[str, Any] = {"precision": precision, "tokens": tokens}
            row["routing"] = given.routing
            row["tile"] = tile_tokens_for(tokens * SHAPE.top_k, SHAPE.experts)
            row["same_bits"] = same_bits(sets[:8])
            rotations = [rotate([partial(block, way, s) for s in sets], DEVICE) for way in WAYS]
            times = interleave(rotations, DEVICE, start=turn)
            row |= {way: statistics.median(t) * 1e6 for way, t in zip(WAYS, times, strict=True)}
            rows.append(row)
            (OUT / "quantised_rows.json").write_text(json.dumps(rows, indent=1))
            text = " ".join(f"{way} {row[way]:8.2f}" for way in WAYS)
            bits = "same bits" if row["same_bits"] else "BITS DIFFER"
            say(f"{precision:9} {tokens:4} tokens, tile {row['tile']:3}: {text} us, {bits}")
            if given.trace and not CPU and tokens in (1, 4, 16):
                traced(sets, tokens, precision)
            del rotations, sets
            if not CPU:
                torch.cuda.empty_cache()
        del weights
    decide(rows)
    return 0 if all(row["same_bits"] for row in rows) else 1


def decide(rows: list[dict[str, Any]]) -> None:
    """Say where another way than the tree's is the fastest."""
    for row in rows:
        best = min(WAYS, key=lambda way: float(row[way]))
        if row[best] < 0.99 * row["tree"]:
            text = f"{best} takes {row[best] / row['tree']:.3f} of the tree's"
            say(f"{row['precision']} {row['tokens']} tokens: {text}")


if __name__ == "__main__":
    sys.exit(main())
