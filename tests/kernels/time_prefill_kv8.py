"""Times prompts over 8-bit pages beside 16-bit ones: TFLOP/s and their ratios, as JSON lines.

    python tests/kernels/time_prefill_kv8.py [--budget-s 40] [--json F] [--cases 4x4096 ...]

Heads of Llama 3.1 8B (32 and 8, of 128), causal, bf16 queries, pages of 16 tokens. Every output is
compared with 16-bit attention on the dequantised cache before it is timed. All implementations of a
case take turns, a few launches each, until its share of the budget is spent; times are medians. A
ratio is the TFLOP/s of an 8-bit cache over those of the 16-bit one of the same row; those with
`invariant` are of `batch_invariant=True`, as the engine calls the op.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ostinato import ops

_HEADS_Q, _HEADS_KV, _DIM, _PAGE = 32, 8, 128, 16
_INT8, _E4M3 = torch.int8, torch.float8_e4m3fn
_WARM_UP, _AT_ONCE, _LEAST_ROUNDS = 2, 3, 5


class Case(NamedTuple):
    """Sequences of so many tokens each, all of which are queries unless told."""

    batch: int
    tokens: int
    queries: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case of BATCHxTOKENS, or BATCHxQUERIESkvTOKENS."""
        batch, rest = text.split("x")
        queries, _, tokens = rest.partition("kv")
        return cls(int(batch), int(tokens or queries), int(queries))

    def __str__(self) -> str:
        keys = "" if self.queries == self.tokens else f"kv{self.tokens}"
        return f"{self.batch}x{self.queries}{keys}"

    @property
    def flops(self) -> float:
        """Of both products, for the keys that a causal mask leaves."""
        seen = self.queries * (self.tokens - self.queries + (self.queries + 1) / 2)
        return 4.0 * self.batch * _HEADS_Q * _DIM * seen


class Cache(NamedTuple):
    """A cache of a dtype, and how it is scaled."""

    name: str
    keys: torch.Tensor
    values: torch.Tensor
    scales: dict[str, torch.Tensor]


def caches(case: Case) -> list[Cache]:
    """Return the 16-bit cache, then 8-bit ones of it."""
    pages = case.batch * -(-case.tokens // _PAGE)
    shape = (pages, _PAGE, _HEADS_KV, _DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    made = [Cache("bf16", k, v, {})]
    for dtype, most in ((_E4M3, 448.0), (_INT8, 127.0)):
        for kind in ("static", "token"):
            parts, scales = [], {}
            for name, x in (("k_scale", k), ("v_scale", v)):
                peak = x.abs().amax(-1).float() if kind == "token" else x.abs().amax().float()
                scales[name] = peak / most
                by_element = scales[name].unsqueeze(-1) if kind == "token" else scales[name]
                codes = x.float() / by_element
                parts.append((codes.round() if dtype is _INT8 else codes).to(dtype))
            name = {_E4M3: "e4m3", _INT8: "int8"}[dtype]
            made.append(Cache(f"{name} {kind}", *parts, scales))
    return made


def attention(case: Case, cache: Cache, q: torch.Tensor, invariant: bool) -> Callable[[], Any]:
    """Return a launch, after comparing its output."""
    pages = cache.keys.size(0)
    table = torch.randperm(pages, device="cuda").int().view(case.batch, -1)
    lens = torch.full((case.batch,), case.tokens, device="cuda", dtype=torch.int32)
    offsets = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * case.queries
    out = torch.empty_like(q)
    options = {
        "cu_seqlens_q": offsets,
        "max_seqlen_q": case.queries,
        "batch_invariant": invariant,
    }

    def launch() -> None:
        ops.paged_attention(
            *(q, cache.keys, cache.values, table, lens), **options, **cache.scales, out=out
        )

    launch()
    if cache.scales:
        parts = []
        for codes, scale in (
            (cache.keys, cache.scales["k_scale"]),
            (cache.values, cache.scales["v_scale"]),
        ):
            by_element = scale.unsqueeze(-1) if scale.ndim else scale
            parts.append((codes.float() * by_element).to(q.dtype))
        expected = ops.paged_attention(q, *parts, table, lens, **options)
        error = (out - expected).float().square().mean().sqrt()
        limit = 2e-2 * expected.float().square().mean().sqrt()
        if not error <= limit:
            raise SystemExit(f"{case} {cache.name}: off by {error}, expected at most {limit}")
    return launch


def microseconds(launch: Callable[[], Any]) -> float:
    """Return the time of a launch, of a few in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_AT_ONCE):
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / _AT_ONCE


def rows(case: Case, invariant: bool, end: float) -> list[dict[str, Any]]:
    """Return the times of all caches, measured in turns until `end`."""
    q = torch.randn(case.batch * case.queries, _HEADS_Q, _DIM, device="cuda", dtype=torch.bfloat16)
    made = caches(case)
    launches = [attention(case, cache, q, invariant) for cache in made]
    for launch in launches * _WARM_UP:
        launch()
    times: list[list[float]] = [[] for _ in launches]
    while len(times[-1]) < _LEAST_ROUNDS or time.monotonic() < end:
        for launch, of_launch in zip(launches, times, strict=True):
            of_launch.append(microseconds(launch))
    usual = statistics.median(times[0])
    return [
        {
            "case": f"{case}{' invariant' if invariant else ''}",
            "impl": cache.name,
            "us": round(statistics.median(of_cache), 2),
            "tflop_s": round(case.flops / statistics.median(of_cache) / 1e6, 1),
            "ratio": round(usual / statistics.median(of_cache), 4),
            "rounds": len(of_cache),
        }
        for cache, of_cache in zip(made, times, strict=True)
    ]


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=40.0, help="of timing, all cases")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--cases", nargs="+", type=Case.parse, default=[*map(Case.parse, ("4x4096", "1x32768"))]
    )
    args = parser.parse_args()
    begin = time.monotonic()
    ways = [(case, invariant) for case in args.cases for invariant in (False, True)]
    document: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "rows": []}
    for i, (case, invariant) in enumerate(ways, start=1):
        for row in rows(case, invariant, begin + args.budget_s * i / len(ways)):
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
