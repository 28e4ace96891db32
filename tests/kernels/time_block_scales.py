"""Times FP8 products with block scales, beside the per-channel kernel and cuBLASLt: a JSON.

    python tests/kernels/time_block_scales.py --json F [--budget-s 35]
    python tests/kernels/time_block_scales.py --variants    # what has to be compiled for it

Launches are captured in CUDA graphs and rotate over weights that are not in the L2; every result is
checked before it is timed. Half of the budget is for the table's choices; the rest is for tiles
that may be faster, timed briefly: what the model of tiles is fitted to.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ostinato.bench.gemm.benchmark import BENCHMARK
from ostinato.bench.gemm.cases import Case, Shape, cases
from ostinato.bench.gemm.impls import PEERS, ours
from ostinato.bench.gemm.inputs import random_inputs, random_weights
from ostinato.bench.harness.benchmark import Implementation
from ostinato.bench.harness.rotation import Pace
from ostinato.bench.harness.runner import time_cases
from ostinato.bench.tune import run as tune
from ostinato.bench.tune.run import choices
from ostinato.ops.common.device import gpu
from ostinato.ops.linear import tile_table, tile_tuning
from ostinato.ops.linear.gemm_variants import BLOCK_E4M3, GEMM_TILED
from ostinato.ops.linear.precompile import precompile
from ostinato.ops.linear.tile_table import H200_SMS, Choice

_SHAPES = ("6144x4096", "28672x4096", "2112x7168", "4096x14336", "7168x16384")
_TOKENS = (1, 16, 64, 128, 512, 4096)
_CASES = cases(map(Shape.parse, _SHAPES), _TOKENS)
_SWEPT = cases(map(Shape.parse, _SHAPES[:4]), (1, 16, 32, 64, 128, 256, 1024, 4096))
_BRISK = Pace(rest_s=8e-3, run_in_s=3e-3)


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget-s", type=float, default=35.0)
    parser.add_argument("--variants", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.variants:
        print(" ".join(_variants("", H200_SMS)))
        return
    device = torch.device("cuda", 0)
    name, sms = gpu(0)
    precompile([v for v in GEMM_TILED if v.name in _variants(name, sms)], device)
    document: dict[str, Any] = {"gpu": name, "torch": torch.__version__, "rows": [], "sweep": []}
    for part, rows, share in (
        ("rows", _rows(name, sms, device), 0.55),
        ("sweep", _sweep(sms, device), 1.0),
    ):
        for row in rows:
            document[part].append(row)
            print(json.dumps(row), flush=True)
            args.json.write_text(json.dumps(document) + "\n")
            if time.monotonic() - begin > share * args.budget_s:
                break


def _variants(name: str, sms: int) -> list[str]:
    blocks = [v.name for v in GEMM_TILED if v.block_scales and v.out_dtype == "bf16"]
    chosen = (_choice(name, sms, case, "e4m3").variant.name for case in _CASES)
    return list(dict.fromkeys([*blocks, *chosen]))


def _choice(name: str, sms: int, case: Case, operand: str) -> Choice:
    n, k = case.shape.n, case.shape.k
    return tile_tuning.choose(name, sms, case.m, n, k, operand, "bf16", True, True, False)


def _rows(name: str, sms: int, device: torch.device) -> Iterator[dict[str, Any]]:
    blocks, channels, peer = ours("fp8-block", with_pdl=True), ours("fp8", with_pdl=True), None
    peer = PEERS["smm_blk"]
    assert isinstance(peer, Implementation)
    # All shapes with few tokens first, in case the budget ends.
    ordered = sorted(_CASES, key=lambda case: (case.m > 128, _SHAPES.index(str(case.shape))))
    for result in time_cases(BENCHMARK, ordered, [blocks, channels, peer], device, pace=_BRISK):
        us = {row.impl: round(row.us, 2) for row in result.rows}
        row: dict[str, Any] = {"case": str(result.case), **us, **result.failures}
        yield {**row, **_described(_choice(name, sms, result.case, BLOCK_E4M3))}


def _sweep(sms: int, device: torch.device) -> Iterator[dict[str, Any]]:
    for shape, of_shape in groupby(_SWEPT, lambda case: case.shape):
        weights = random_weights(shape, [BLOCK_E4M3], device)
        for case in of_shape:
            sets = random_inputs(case, weights)[BLOCK_E4M3]
            timed = [tune._quick(choice, sets, device) for choice in choices(case, BLOCK_E4M3, sms)]
            yield {
                "case": str(case),
                "times": [
                    {"us": round(one.us, 2), **_described(one.choice)}
                    for one in timed
                    if not one.failure
                ],
                "failures": [one.failure for one in timed if one.failure],
            }


def _described(choice: Choice) -> dict[str, Any]:
    cut = {name: getattr(choice, name) for name in tile_table.CUT if getattr(choice, name)}
    return {"variant": choice.variant.name, **cut}


if __name__ == "__main__":
    main()
