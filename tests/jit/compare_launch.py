"""Times a launch through `_C` and `GraphRunner.run` in two installs of the package, alternating.

    python tests/jit/compare_launch.py BEFORE AFTER --json docs/results/launch_before_after.json

BEFORE and AFTER are Python interpreters in which the package is installed, or folders that hold it
as `ostinato`. Each has a process of its own for the whole comparison, and they take turns, a round
each. Launches go to libraries that the host's compiler builds, so that what is timed is all that
the host does before the driver; runs replay a graph where there is a GPU. `us` is the median of the
rounds, `ratio` the median of AFTER over BEFORE, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

Timed = Callable[[], float]  # microseconds of one call
_LAUNCHES, _RUNS, _BURST = 20_000, 2_000, 100
_RECORDER = """\
#include <cstdint>
#include "{header}"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char* ostinato_error_string(int) {{ return "none"; }}
EXPORT int ostinato_prepare() {{ return 0; }}
EXPORT int ostinato_launch(const ostinato::{params}*, void*) {{ return 0; }}
EXPORT int ostinato_workspace_bytes(int, int64_t, int64_t, int64_t*) {{ return 0; }}
{fields}
"""
_TABLE = """\
EXPORT const ostinato::FieldTable* ostinato_fields() {{
  return ostinato::field_table<ostinato::{}>();
}}"""
_HASH = "EXPORT uint64_t ostinato_abi_version() {{ return {}ULL; }}"

# What the ops pass: addresses, strides, sizes.
_GEMM = {
    **dict.fromkeys(("x", "w", "x_scale", "w_scale", "out", "bias", "w_sum", "n_active"), 1 << 45),
    **dict.fromkeys(("x_stride", "w_stride", "out_stride", "m", "n", "k"), 4096),
    **dict.fromkeys(("x_scale_stride", "w_scale_stride", "cluster", "share_weights", "band"), 1),
    **dict.fromkeys(("tile_channels", "tile_tokens"), 128),
    **dict.fromkeys(("x_zero_point", "x_zero_point_stride", "split_k"), 0),
    "pdl": True,
    "stream": 1 << 46,
}
_DECODE = {
    **dict.fromkeys(("q", "out"), (1 << 45, 4096, 128)),
    **dict.fromkeys(("k_cache", "v_cache"), (1 << 45, 1 << 16, 1024, 128)),
    "lse": (0, 0, 0),
    "k_scale": (0, 0, 0, 0),
    "v_scale": (0, 0, 0, 0),
    **dict.fromkeys(("page_table", "seq_lens", "cu_seqlens_q", "workspace", "stream"), 1 << 45),
    **dict.fromkeys(("page_table_stride", "batch", "heads_q", "heads_kv", "pages"), 32),
    **dict.fromkeys(("page_size", "max_pages", "max_seqlen_q"), 64),
    "sinks": 0,
    "left": -1,
    "right": 0,
    "scale": 0.125,
    "softcap": 0.0,
    "pdl": True,
}
# By struct: its header in either package, its class before libraries described themselves, and the
# name of its hash then.
_STRUCTS = {
    "W8A8GemmParams": (("gemm_w8a8/params.h",), "W8A8Gemm", "gemm_w8a8"),
    "PagedDecodeParams": (
        ("attention/decode/params.h", "attention/common/params.h", "attention/params.h"),
        "PagedDecode",
        "attention",
    ),
}


def _launch_of(folder: Path, params: str) -> Callable[..., None]:
    """Build a library that does nothing and return its launch."""
    import ostinato
    from ostinato import _C

    headers, old_class, old_hash = _STRUCTS[params]
    csrc = Path(ostinato.__file__).parent / "csrc"
    header = next(name for name in headers if (csrc / name).exists())
    describes_itself = hasattr(_C, "Library")
    fields = _TABLE.format(params) if describes_itself else _HASH.format(_C.ABI[old_hash])
    source, library = folder / f"{params}.cpp", folder / f"{params}.so"
    source.write_text(_RECORDER.format(header=header, params=params, fields=fields))
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{csrc}", source, "-o", library]
    subprocess.run(command, check=True)
    kind = _C.Library if describes_itself else getattr(_C, old_class)
    launch: Callable[..., None] = kind(str(library)).launch
    return launch


def _time_keywords(launch: Callable[..., None], given: Mapping[str, Any]) -> float:
    """Time calls that spell their keywords, as the ops do."""
    names = list(given)
    scope: dict[str, Any] = {"clock": time.perf_counter}
    lines = (
        f"def run(launch, count, {', '.join(names)}):",
        "    start = clock()",
        "    for _ in range(count):",
        f"        launch({', '.join(f'{name}={name}' for name in names)})",
        "    return clock() - start",
    )
    exec("\n".join(lines), scope)
    seconds: float = scope["run"](launch, _LAUNCHES, *given.values())
    return seconds / _LAUNCHES * 1e6


def _time_dict(launch: Callable[..., None], given: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    for _ in range(_LAUNCHES):
        launch(**given)
    return (time.perf_counter() - start) / _LAUNCHES * 1e6


def _runner() -> Timed:
    """Return what times runs of a step of one small operation, replayed where there is a GPU."""
    import torch

    from ostinato import graphs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = graphs.BufferSpec((8,), torch.float32, 0.0, lambda g, s: torch.rand(s, generator=g))
    buffers = graphs.StaticBuffers({"x": spec}, max_batch=4, device=device)
    runner = graphs.GraphRunner(lambda batch: {"y": batch.x + 1}, buffers)
    runner.capture()
    inputs = {"x": torch.ones(4, 8, device=device)}

    def run() -> float:
        took = 0.0
        for _ in range(_RUNS // _BURST):
            start = time.perf_counter()
            for _ in range(_BURST):
                runner.run(4, inputs)
            took += time.perf_counter() - start
            if device.type == "cuda":  # a queue that is full would time the device
                torch.cuda.synchronize()
        return took / _RUNS * 1e6

    return run


def _serve() -> None:
    """Measure a round for each line of input: what a process of one package does."""
    with tempfile.TemporaryDirectory() as folder:
        gemm, decode = (_launch_of(Path(folder), params) for params in _STRUCTS)
        timed: dict[str, Timed] = {
            "launch/gemm keywords": partial(_time_keywords, gemm, _GEMM),
            "launch/gemm dict": partial(_time_dict, gemm, _GEMM),
            "launch/decode keywords": partial(_time_keywords, decode, _DECODE),
            "graph_run/one operation": _runner(),
        }
        for _ in sys.stdin:
            print(json.dumps({name: run() for name, run in timed.items()}), flush=True)


def _start(package: str) -> subprocess.Popen[str]:
    path = Path(package)
    python, added = (sys.executable, package) if path.is_dir() else (package, "")
    environment = {**os.environ, "PYTHONPATH": added} if added else dict(os.environ)
    return subprocess.Popen(
        [python, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _round(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    times: dict[str, float] = json.loads(process.stdout.readline())
    return times


def _rows(before: list[dict[str, float]], after: list[dict[str, float]]) -> Iterator[dict]:
    for name in before[0]:
        section, case = name.split("/")
        old, new = ([times[name] for times in rounds] for rounds in (before, after))
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
        for impl, times in (("before", old), ("after", new)):
            us = round(statistics.median(times), 3)
            row = {"section": section, "case": case, "impl": impl, "us": us}
            yield row if impl == "before" else {**row, "ratio": round(ratio, 3)}


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def main() -> None:
    """Compare two packages, or serve one."""
    if sys.argv[1:] == ["--serve"]:
        _serve()
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    processes = _start(args.before), _start(args.after)
    for process in processes:  # a round to warm up
        _round(process)
    rounds = [tuple(_round(process) for process in processes) for _ in range(args.rounds)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    rows = list(_rows([before for before, _ in rounds], [after for _, after in rounds]))
    for row in rows:
        print(row)
    if args.json is not None:
        found = {
            "gpu": _gpu(),
            "python": platform.python_version(),
            "rounds": args.rounds,
            "rows": rows,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
