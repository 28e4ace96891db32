"""Times bf16 products beside cuBLAS, and tiles beside the table's: a JSON of ratios.

    python tests/kernels/time_linear16.py --json F [--budget-s 170] [--no-sweep]
    python tests/kernels/time_linear16.py --json F --budget-s 25 --cases "N2048 K8192 M64" ...

Launches are captured in CUDA graphs and rotate over weights that are not in the L2; every result is
checked before it is timed. The first part is `bench gemm --dtype bf16 --peer bf16` of the shapes of
8B, 1B and 70B models, output projections and a router. With what is left of the budget, the second
part times tiles that the table could choose for up to 64 tokens, those for the model's too, and the
best of them beside the table's and cuBLAS. `--cases` is the second part of some cases alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ostinato.bench.gemm.benchmark import BENCHMARK
from ostinato.bench.gemm.cases import Case, Shape, cases
from ostinato.bench.gemm.impls import OURS_BF16, PEERS, ours
from ostinato.bench.gemm.inputs import Inputs, random_inputs, random_weights
from ostinato.bench.harness.benchmark import Implementation
from ostinato.bench.harness.rotation import interleave, rotate
from ostinato.bench.harness.runner import time_cases
from ostinato.bench.tune.run import Timed, _calls, choices, time_choices
from ostinato.ops.common.device import gpu
from ostinato.ops.linear import tile_table, tile_tuning
from ostinato.ops.linear.gemm_variants import GEMM_TILED, GemmTiled
from ostinato.ops.linear.precompile import precompile
from ostinato.ops.linear.tile_table import Choice

_FEW = (1, 8, 16, 32, 64)
_MANY = (128, 256, 512, 1024, 2048, 4096)
_8B = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")
_1B = ("3072x2048", "2048x2048", "16384x2048", "2048x8192")
_HEADS = ("128256x4096", "128256x2048", "128x2048")
_70B = ("10240x8192", "8192x8192", "57344x8192", "8192x28672")
_TIMED = (
    *cases(map(Shape.parse, (*_8B, *_1B, *_HEADS)), _FEW),
    *cases(map(Shape.parse, _8B), _MANY),
    *cases(map(Shape.parse, _70B), _FEW),
    *cases(map(Shape.parse, _70B[:2]), (1024, 4096)),
)
_SWEPT = tuple(cases(map(Shape.parse, (*_1B, *_8B, "128x2048", "128256x4096")), _FEW))


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="written after each part")
    parser.add_argument("--budget-s", type=float, default=170.0)
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[])
    args = parser.parse_args()
    end = time.monotonic() + args.budget_s
    device = torch.device("cuda", 0)
    name, sms = gpu(0)
    timed = () if args.cases else _TIMED
    swept = args.cases or (() if args.no_sweep else _SWEPT)
    precompile({_choice(name, sms, case).variant for case in timed}, device)
    document: dict[str, Any] = {"gpu": name, "torch": torch.__version__, "rows": [], "sweep": []}
    try:
        for row in _rows(name, sms, timed, device, end):
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
        document["means"] = _means(document["rows"])
        print(json.dumps(document["means"], indent=1), flush=True)
        for row in _sweep(sms, swept, device, end):
            document["sweep"].append(row)
            print(json.dumps(row), flush=True)
    finally:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


def _choice(name: str, sms: int, case: Case) -> Choice:
    n, k = case.shape.n, case.shape.k
    return tile_tuning.choose(name, sms, case.m, n, k, "bf16", "bf16", True, False, True)


def _cublas() -> Implementation[Case, Inputs]:
    cublas = PEERS["bf16"]
    assert isinstance(cublas, Implementation)
    return cublas


def _rows(
    name: str, sms: int, timed: Sequence[Case], device: torch.device, end: float
) -> Iterator[dict[str, Any]]:
    impls = [ours("bf16", with_pdl=True), _cublas()]
    for result in time_cases(BENCHMARK, timed, impls, device):
        us = {row.impl: row.us for row in result.rows}
        row: dict[str, Any] = {"case": str(result.case), **us, **result.failures}
        if len(us) == 2:
            row["ratio"] = round(us[OURS_BF16] / us["bf16"], 3)
        yield {**row, **_described(_choice(name, sms, result.case))}
        if time.monotonic() > end:
            return


def _means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    groups = {
        "8B 1B heads router, M <= 64": lambda c: c.m <= 64 and str(c.shape) not in _70B,
        "70B, M <= 64": lambda c: c.m <= 64 and str(c.shape) in _70B,
        "M >= 1024": lambda c: c.m >= 1024,
        "64 < M < 1024": lambda c: 64 < c.m < 1024,
    }
    found = {}
    for group, belongs in groups.items():
        within = [r for r in rows if "ratio" in r and belongs(Case.parse(r["case"]))]
        if within:
            worst = max(within, key=lambda r: r["ratio"])
            mean = math.exp(sum(math.log(r["ratio"]) for r in within) / len(within))
            found[group] = {
                "geometric mean": round(mean, 3),
                "worst": [worst["case"], worst["ratio"]],
            }
    return found


def _sweep(
    sms: int, swept: Sequence[Case], device: torch.device, end: float
) -> Iterator[dict[str, Any]]:
    weights, of_shape = {}, None
    for case in swept:
        if time.monotonic() > end:
            return
        if of_shape != case.shape:
            weights, of_shape = random_weights(case.shape, ["bf16"], device), case.shape
        sets = random_inputs(case, weights)["bf16"]
        given = list(dict.fromkeys([*choices(case, "bf16", sms), *_more(case)]))
        timed = time_choices(given, sets, device)
        ranked = sorted(timed, key=lambda one: one.us)
        best = min((one for one in timed if one.final), key=lambda one: one.us)
        beside = [_calls(one.choice, sets, device) for one in (timed[0], best)]
        rotations = [rotate(calls, device) for calls in (*beside, _cublas().bind(case, sets))]
        table_us, best_us, cublas_us = (
            1e6 * statistics.median(seconds) for seconds in interleave(rotations, device)
        )
        yield {
            "case": str(case),
            "cublas_us": round(cublas_us, 2),
            "ratio": round(table_us / cublas_us, 3),
            "best_ratio": round(best_us / cublas_us, 3),
            "table": _timed(timed[0]),
            "best": _timed(best),
            "gain": round(best_us / table_us, 3),
            "others": [_timed(one) for one in ranked[:4]],
            "failures": [one.failure for one in timed if one.failure],
        }


def _more(case: Case) -> Iterator[Choice]:
    """Yield ways to cut an output that the model does not consider, or takes for slow."""
    m, n = case.m, case.shape.n
    fitting = [v for v in GEMM_TILED if (v.dtype, v.out_dtype) == ("bf16", "bf16")]
    fitting = [v for v in fitting if not v.pingpong and v.tokens <= 128]
    if m <= 64:
        fitting = [v for v in fitting if v.tokens <= 64 and v.channels <= 128]
    for variant in fitting:
        if variant.tokens < min(m, 16) or variant.tokens >= 4 * max(m, 8):
            continue
        least = 16 if variant.channels == 64 else 80  # those of the smaller kernel are not repeated
        for channels, sharing in product(range(least, variant.channels + 1, 16), range(3)):
            ctas = math.ceil(n / channels) * math.ceil(m / variant.tokens)
            if 60 <= ctas <= 2 * 132 or channels <= 32:
                yield from _shared(variant, channels, m, sharing)


def _shared(variant: GemmTiled, channels: int, m: int, sharing: int) -> Iterator[Choice]:
    tiles = math.ceil(m / variant.tokens)
    tokens = math.ceil(m / tiles)
    if sharing == 0 or (sharing == 1 and m > 16):
        yield Choice(variant, channels, tokens, cluster=1 + sharing)
    if sharing == 2 and tiles > 1:
        yield Choice(variant, channels, tokens, cluster=2, share_weights=1)


def _timed(one: Timed) -> dict[str, Any]:
    return {"us": round(one.us, 2), **_described(one.choice)}


def _described(choice: Choice) -> dict[str, Any]:
    cut = {name: getattr(choice, name) for name in tile_table.CUT if getattr(choice, name)}
    return {"variant": choice.variant.name, **cut}


if __name__ == "__main__":
    main()
