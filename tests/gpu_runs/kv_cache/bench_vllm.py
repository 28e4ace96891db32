"""Times vLLM's decode step over an 8-bit KV cache: Llama-3.1-8B's shape, INT8 weights, one GPU.

    PYTHONPATH=$V/vllm_0.33.0:$V/deps:$V/stubs python bench_vllm.py --out $OUT --batches 32,128

V is the folder of vLLM's unpacked site. No checkpoint is needed: a config.json is written below
/tmp/T, weights are random, and prompts are random tokens. Settings are vLLM's own (torch.compile,
CUDA graphs), but for the options below; all scales of the KV cache are 1.

For each batch the same prompts are generated from again and again, so that the prefix cache has
them: texts of N1 and of N2 tokens in turn. A step takes (median time of N2 - median time of N1) /
(N2 - N1); rows also have the median interval between two steps of the engine.

vLLM runs in a process of its own, which is ended after --limit seconds. Files in --out:
vllm_int8_default.json (written anew after each batch), vllm_int8_default.log, vllm_table.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from random_llama import refill, set_scales, write_config

NAME = "vllm_int8_default"
MEASURE_S = 110.0  # no batch is begun later than this

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/T/ind",
    "TRITON_CACHE_DIR": "/tmp/T/triton_cache",
    "VLLM_CACHE_ROOT": "/tmp/T/vllm_cache",
    "VLLM_CONFIG_ROOT": "/tmp/T/vllm_cfg",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_PLUGINS": "",
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "NO_COLOR": "1",
    "HF_HOME": "/tmp/T/hf",
}

# What vLLM's log says of its start.
PATTERNS = [
    (
        r"Model loading took ([\d.]+) GiB(?: memory)? and ([\d.]+) seconds",
        ("load_gib", "load_s_log"),
    ),
    (r"torch\.compile took ([\d.]+) s in total", ("compile_s_log",)),
    (r"Dynamo bytecode transform time: ([\d.]+) s", ("dynamo_s_log",)),
    (r"Compiling a graph for compile range .* takes ([\d.]+) s", ("inductor_s_log",)),
    (r"Initial profiling/warmup run took ([\d.]+) s", ("profile_run_s_log",)),
    (
        r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB",
        ("capture_s_log", "capture_gib_log"),
    ),
    (r"init engine .* took ([\d.]+) s", ("init_engine_s_log",)),
    (r"GPU KV cache size: ([\d,]+) tokens", ("kv_tokens",)),
    (r"for weight, ([\d.]+) GiB for peak activation", ("peak_act_gib",)),
]
KEPT = re.compile(
    r"Selected .* for|attention backend|FlashAttention version|Model Runner|cudagraph_mode|"
    r"Asynchronous scheduling|Chunked prefill|compile cache|Falling back|fallback|WARNING|ERROR"
)


# What runs in vLLM's process.


def time_start(phases: dict[str, float]) -> None:
    """Have vLLM's worker note in `phases` how long its start takes, and the memory used after."""
    import torch
    import vllm.v1.worker.gpu.model_runner as second_runner
    import vllm.v1.worker.gpu_model_runner as first_runner
    from vllm.v1.worker.gpu_worker import Worker

    def timed(cls: Any, name: str, phase: str) -> None:
        method = getattr(cls, name)

        def wrapper(self: Any, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = method(self, *args, **options)
            torch.cuda.synchronize()
            phases[f"{phase}_s"] = phases.get(f"{phase}_s", 0) + time.perf_counter() - began
            free, total = torch.cuda.mem_get_info()
            phases[f"{phase}_gib_used_after"] = (total - free) / 2**30
            return result

        setattr(cls, name, wrapper)

    timed(Worker, "init_device", "init_device")
    timed(Worker, "load_model", "load_model")
    timed(Worker, "determine_available_memory", "profile_run_and_compile")
    timed(Worker, "initialize_from_config", "kv_alloc")
    timed(Worker, "compile_or_warm_up_model", "warmup_and_capture")
    timed(first_runner.GPUModelRunner, "capture_model", "capture")
    timed(second_runner.GPUModelRunner, "capture_model", "capture")


def settings_of(llm: Any) -> dict[str, Any]:
    """Return the settings that vLLM chose."""
    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    cache = ("cache_dtype", "num_gpu_blocks", "block_size", "enable_prefix_caching")
    return {
        "mode": str(compilation.mode),
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "capture_sizes": str(compilation.cudagraph_capture_sizes),
        "compile_time": compilation.compilation_time,
        "custom_ops": str(compilation.custom_ops),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "v2_runner": config.use_v2_model_runner,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "quantization": str(config.model_config.quantization),
        "backend": str(getattr(config.attention_config, "backend", None)),
        "opt_level": str(getattr(config, "optimization_level", None)),
        **{name: str(getattr(config.cache_config, name, None)) for name in cache},
    }


class Texts:
    """Generates texts of the same prompts, and notes when the engine's steps ended."""

    def __init__(self, llm: Any, prompt_len: int) -> None:
        self.llm = llm
        self.prompt_len = prompt_len
        self.random = random.Random(0)
        self.prompts: list[list[int]] = []
        self.stamps: list[float] = []
        self.engine_step = llm.llm_engine.step
        llm.llm_engine.step = self.step

    def step(self) -> Any:
        result = self.engine_step()
        self.stamps.append(time.perf_counter())
        return result

    def generate(self, batch: int, tokens: int) -> tuple[float, list[float], Any]:
        """Return the seconds, the times at which steps ended, and vLLM's outputs."""
        import torch
        from vllm import SamplingParams

        while len(self.prompts) < batch:
            self.prompts.append([self.random.randrange(128000) for _ in range(self.prompt_len)])
        prompts = [{"prompt_token_ids": prompt} for prompt in self.prompts[:batch]]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self.stamps.clear()
        torch.cuda.synchronize()
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == [tokens] * batch, lengths[:4]
        return seconds, list(self.stamps), outputs


def measure(texts: Texts, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a batch."""
    for _ in range(args.warm):
        seconds, _, outputs = texts.generate(batch, args.n1)
        cached = getattr(outputs[0], "num_cached_tokens", None)
        print(f"WARM b={batch} {seconds:.2f} s, cached tokens of prompt 0: {cached}", flush=True)
    short, long, intervals = [], [], []
    for _ in range(args.reps):
        short.append(texts.generate(batch, args.n1)[0])
        seconds, stamps, outputs = texts.generate(batch, args.n2)
        long.append(seconds)
        steps = len(stamps)
        ends = itertools.pairwise(stamps[steps // 4 : -2])
        intervals += [end - begin for begin, end in ends]
    short_s, long_s = statistics.median(short), statistics.median(long)
    ms = (long_s - short_s) / (args.n2 - args.n1) * 1e3
    intervals.sort()
    row = {
        "batch": batch,
        "prompt": args.prompt_len,
        "cached_tokens": sum(getattr(x, "num_cached_tokens", 0) or 0 for x in outputs),
        "ms_step": ms,
        "tok_s": batch / ms * 1e3,
        "step_interval_p50_ms": statistics.median(intervals) * 1e3,
        "step_interval_p10_ms": intervals[len(intervals) // 10] * 1e3,
        "step_interval_p90_ms": intervals[len(intervals) * 9 // 10] * 1e3,
        "t_n1_s": short,
        "t_n2_s": long,
        "engine_steps": steps,
        "distinct_tokens": len(set(outputs[0].outputs[0].token_ids)),
    }
    print(
        f"ROW int8 b={batch} ms/step={ms:.3f} p50={row['step_interval_p50_ms']:.3f} "
        f"tok/s={row['tok_s']:.0f} T{args.n1}={short_s:.3f}s T{args.n2}={long_s:.3f}s "
        f"steps={steps} distinct={row['distinct_tokens']}",
        flush=True,
    )
    return row


def child(args: argparse.Namespace) -> None:
    """Start vLLM, measure all batches, and end the process."""
    started = time.time()
    phases: dict[str, float] = {}
    result: dict[str, Any] = {
        "config": "int8",
        "mode": "default",
        "args": vars(args),
        "phases": phases,
        "rows": [],
        "notes": [],
    }

    def save() -> None:
        (args.out / f"{NAME}.json").write_text(json.dumps(result, indent=1, default=str))

    folder = write_config()
    began = time.time()
    import torch
    import vllm

    result["versions"] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
    }
    phases["import_s"] = time.time() - began
    try:
        time_start(phases)
    except Exception as error:  # the steps can be timed all the same
        result["notes"].append(f"timers: {error!r}")
    options: dict[str, Any] = {}
    if args.captures:
        sizes = [int(size) for size in args.captures.split(",")]
        options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    began = time.time()
    llm = vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.gpu_util,
        max_num_seqs=args.max_seqs,
        generation_config="vllm",
        seed=0,
        tensor_parallel_size=1,
        kv_cache_dtype=args.kv,
        enable_prefix_caching=True,
        **options,
    )
    phases["LLM_init_s"] = time.time() - began
    result["settings"] = settings_of(llm)
    result["kv"] = args.kv
    save()
    try:
        result["params"] = llm.apply_model(refill)[0]
    except Exception as error:
        result["notes"].append(f"refill failed: {error!r}")
        print("refill failed", repr(error), flush=True)
    result["kv_scales_before"] = llm.apply_model(set_scales)[0]
    print("SCALES", result["kv_scales_before"], flush=True)
    texts = Texts(llm, args.prompt_len)
    began = time.time()
    for batch in map(int, args.batches.split(",")):
        if time.time() - began > MEASURE_S:
            result["notes"].append(f"batch {batch} not started after {MEASURE_S:g} s")
            break
        result["rows"].append(measure(texts, batch, args))
        save()
    phases["measure_s"] = time.time() - began
    phases["child_total_s"] = time.time() - started
    save()
    print("CHILD DONE", flush=True)
    sys.stdout.flush()
    os._exit(0)


# What starts that process and reads its log.


def reader(
    process: subprocess.Popen[str],
    log: Path,
    began: float,
    lines: list[str],
    found: dict[str, float],
    kept: list[str],
) -> Callable[[], None]:
    """Return what copies the output into the log, and what is of interest into the lists."""

    def read() -> None:
        assert process.stdout is not None
        with log.open("w") as file:
            for line in process.stdout:
                file.write(f"{time.time() - began:7.2f} {line}")
                file.flush()
                lines.append(line.rstrip())
                for pattern, keys in PATTERNS:
                    match = re.search(pattern, line)
                    if match:
                        for key, value in zip(keys, match.groups(), strict=True):
                            found.setdefault(key, float(value.replace(",", "")))
                        found.setdefault(keys[0] + "_at", round(time.time() - began, 1))
                if line.startswith(("ROW", "WARM", "SCALES")):
                    print(line.rstrip(), flush=True)
                elif KEPT.search(line) and len(kept) < 60:
                    kept.append(line.strip()[:300])

    return read


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines that say what was measured."""
    lines = [
        f"== int8 mode=default rc={result['rc']} wall={result['wall_s']:.0f}s "
        f"{result.get('versions', '')}",
        "   settings " + json.dumps(result.get("settings", {})),
        "   phases   " + ", ".join(f"{k}={v:.2f}" for k, v in result["phases"].items()),
        "   log      " + ", ".join(f"{k}={v:g}" for k, v in result["log"].items()),
    ]
    for line in result["log_lines"]:
        if re.search(r"Selected|attention backend|FlashAttention version|Runner", line):
            lines.append("   | " + line[-160:])
    if result["notes"]:
        lines.append("   notes    " + "; ".join(result["notes"]))
    lines.append(
        f"{'config':>6} {'batch':>5} {'ms/step':>8} {'p10':>7} {'p50':>7} {'p90':>7} "
        f"{'tok/s':>8} {'spread%':>7}"
    )
    for row in result["rows"]:
        long = row["t_n2_s"]
        spread = (max(long) - min(long)) / statistics.median(long) * 100
        lines.append(
            f"{'int8':>6} {row['batch']:>5} {row['ms_step']:8.3f} "
            f"{row['step_interval_p10_ms']:7.3f} {row['step_interval_p50_ms']:7.3f} "
            f"{row['step_interval_p90_ms']:7.3f} {row['tok_s']:8.0f} {spread:7.1f}"
        )
    return lines


def parent(args: argparse.Namespace) -> None:
    """Run vLLM's process within its limit, add its log to its results, and print the table."""
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"{NAME}.json"
    results.unlink(missing_ok=True)
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--child"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    lines: list[str] = []
    found: dict[str, float] = {}
    kept: list[str] = []
    read = reader(process, args.out / f"{NAME}.log", began, lines, found, kept)
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    code: int | str
    try:
        code = process.wait(timeout=args.limit)
    except subprocess.TimeoutExpired:
        code = "limit"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    thread.join(5)
    result: dict[str, Any] = {
        "config": "int8",
        "mode": "default",
        "rows": [],
        "phases": {},
        "notes": ["no result"],
    }
    if results.exists():
        result = json.loads(results.read_text())
    result |= {"rc": code, "wall_s": time.time() - began, "log": found, "log_lines": kept}
    results.write_text(json.dumps(result, indent=1, default=str))
    if code != 0 or not result["rows"]:
        print(f"--- {NAME} rc={code}; last of its log:", flush=True)
        print("\n".join(line[:400] for line in lines[-45:]), flush=True)
    text = "\n".join(table(result))
    print(text, flush=True)
    with (args.out / "vllm_table.txt").open("a") as file:
        file.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "."))
    parser.add_argument("--kv", default="fp8", help="kv_cache_dtype of 8 bits")
    parser.add_argument("--batches", default="32,128", help="',' separated")
    parser.add_argument(
        "--captures", default="", help="cudagraph_capture_sizes, ',' separated; '' = vLLM's own"
    )
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--n1", type=int, default=8, help="tokens of the shorter texts")
    parser.add_argument("--n2", type=int, default=136, help="tokens of the longer texts")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2, help="texts before the timed ones")
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4352)
    parser.add_argument("--gpu-util", type=float, default=0.85)
    parser.add_argument("--limit", type=float, default=170.0, help="seconds, start to end")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    child(args) if args.child else parent(args)


if __name__ == "__main__":
    main()
