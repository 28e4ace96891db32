#!/usr/bin/env python3
"""Times `ostinato serve` beside vLLM's OpenAI server on one GPU, with the same client.

    python tests/gpu_runs/served/run.py [int8|fp8] [PART ...] [options]

run.sh says what each part does, what it needs and what comes back. The working directory is the
repository's root. V names the folder of vLLM's unpacked site, OSTINATO_CACHE that of our compiled
kernels; results go to OUT.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from contextlib import suppress
from pathlib import Path

T0 = time.time()
H = Path(__file__).resolve().parent
PARTS = ["prepare", "vllm", "ours", "load", "step", "engine", "join"]
ap = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
ap.add_argument("dtype", nargs="?", default="int8", choices=["int8", "fp8"])
ap.add_argument("parts", nargs="*", default=PARTS)
ap.add_argument("--levels", default="1:20,16:128,64:384,256:1024", help="CONCURRENCY:REQUESTS,...")
ap.add_argument("--prompt", default="128 2048", help="tokens of prompts, log-uniform")
ap.add_argument("--output", type=int, default=256)
ap.add_argument("--steps", default="64,256", help="batches of the step")
ap.add_argument("--texts", default="64 288", help="short and long texts of the step")
ap.add_argument("--repeats", type=int, default=2, help="of the step and of bench engine")
ap.add_argument("--shape", default="llama-3.1-8b")
ap.add_argument("--device", default="cuda")
ap.add_argument("--kv-gib", type=float, default=40, help="of the KV cache of each server")
ap.add_argument("--max-batch", type=int, default=256)
ap.add_argument(
    "--deadline", type=float, default=570, help="seconds after which no measurement begins"
)
ap.add_argument("--start-limit", type=float, default=240, help="seconds that a server may take")
ap.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
ap.add_argument("--work", type=lambda p: Path(p).resolve(), default=Path("/tmp/serve_run"))
ap.add_argument("--vllm-command", default="", help="for trials: what stands in for vLLM's server")
ap.add_argument("--vllm-flags", default="", help="more flags of vLLM's server")
ap.add_argument("--ours-flags", default="", help="more flags of our server")
ap.add_argument(
    "--sizes",
    default="1,2,4,8,16,24,32,48,64,80,96,112,128,160,192,208,224,240,256",
    help="batch sizes that ours captures; vLLM's are its own, multiples of 8 and more",
)
A = ap.parse_intermixed_args([a for a in sys.argv[1:] if a != "--"])
assert set(A.parts) <= set(PARTS), A.parts
V = Path(os.environ.get("V", "/tmp/V")).resolve()
PY = sys.executable
W = A.work / A.dtype
W.mkdir(parents=True, exist_ok=True)
A.out.mkdir(parents=True, exist_ok=True)
NAME = A.shape
# Both dtypes may run at once, each on a GPU of its own.
FIRST_PORT = 8431 if A.dtype == "int8" else 8441
PORTS = {"ours": FIRST_PORT, "vllm": FIRST_PORT + 1}
IMPLS = {"ours": f"ostinato_{A.dtype}", "vllm": "vllm_0.33.0"}
low, high = map(int, A.prompt.split())
CONTEXT = max(high + A.output, 128 + int(A.texts.split()[1]))
LOG: list[str] = []
RESULTS: dict[str, object] = {"argv": sys.argv, "log": LOG}
CHILDREN: dict[str, subprocess.Popen[bytes]] = {}


def say(*words: object) -> None:
    LOG.append(f"[{time.time() - T0:5.0f}] " + " ".join(map(str, words)))
    print(LOG[-1], flush=True)
    (A.out / "results.json").write_text(json.dumps(RESULTS, indent=1, default=str))


def left() -> float:
    return float(A.deadline) - (time.time() - T0)


def start(
    name: str, argv: list[str], env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    with open(W / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            argv,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
    CHILDREN[name] = process
    return process


def stop(name: str) -> None:
    process = CHILDREN.pop(name, None)
    if process is None:
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(name: str, lines: int = 30) -> None:
    text = (W / f"{name}.log").read_text(errors="replace").replace("\r", "\n").splitlines()
    for line in text[-lines:]:
        print("   ", line[:240], flush=True)


def run(
    name: str, argv: list[str], limit: float, env: dict[str, str] | None = None, shown: int = 0
) -> bool:
    """Run to its end, its limit or the deadline; the last lines are shown when it fails."""
    limit = min(limit, left())
    if limit < 3:
        say(name, "skipped: no time")
        return False
    began = time.time()
    process = start(name, argv, env)
    try:
        rc = process.wait(limit)
    except subprocess.TimeoutExpired:
        rc = 124
    stop(name)
    say(f"{name}: rc {rc}, {time.time() - began:.1f} s")
    if rc or shown:
        tail(name, 30 if rc else shown)
    return rc == 0


# ---------------------------------------------------------------- what is served, and by whom
def checkpoint_folder() -> Path:
    known = W / "folder"
    if known.exists():
        return Path(known.read_text())
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > 14 << 30
    folder = (shm if roomy and A.shape != "tiny" else W) / f"ostinato_{A.shape}_{A.dtype}"
    known.write_text(str(folder))
    return folder


def prepare() -> None:
    wheels = A.work / "wheels"
    if not wheels.exists():
        for wheel in sorted((H / "whl").glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(wheels)
    folder = checkpoint_folder()
    vocab = ["--vocab", "2304"] if A.shape == "tiny" else []
    if not (folder / "tokenizer_config.json").exists():
        argv = [PY, str(H / "checkpoint.py"), str(folder), "--shape", A.shape, "--dtype", A.dtype]
        run("checkpoint", [*argv, "--device", A.device, *vocab], 120, shown=1)
    if A.device != "cpu":  # beside the start of vLLM; `ours` waits for it
        start("build", [PY, "-m", "ostinato", "build", "--for-model", str(folder)])


def vllm_command(folder: Path) -> tuple[list[str], dict[str, str]]:
    wheels = A.work / "wheels"
    env = {"PYTHONPATH": f"{V}/vllm_0.33.0:{V}/deps:{V}/stubs:{wheels}"}
    cache = A.work / "vllm_cache"
    env |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_PLUGINS": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_CACHE_ROOT": f"{cache}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "VLLM_CONFIG_ROOT": f"{cache}/config",
        "HF_HOME": f"{cache}/hf",
    }
    program = A.vllm_command.split() or [
        PY,
        "-W",
        "ignore",
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]
    argv = [
        *program,
        "--model",
        str(folder),
        "--served-model-name",
        NAME,
        "--host",
        "127.0.0.1",
        "--port",
        str(PORTS["vllm"]),
        "--dtype",
        "bfloat16",
        "--max-model-len",
        str(CONTEXT),
        "--max-num-seqs",
        str(A.max_batch),
        "--kv-cache-memory-bytes",
        str(int(A.kv_gib * 2**30)),
        "--gpu-memory-utilization",
        "0.5",
        "--disable-prefix-caching",
        "--generation-config",
        "vllm",
        "--disable-uvicorn-access-log",
        "--seed",
        "0",
        *A.vllm_flags.split(),
    ]
    return argv, env


def ours_command(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    token = 2 * config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"] * 2
    pages = int(A.kv_gib * 2**30) // (16 * token)
    return [
        PY,
        "-m",
        "ostinato",
        "serve",
        str(folder),
        "--served-model-name",
        NAME,
        "--port",
        str(PORTS["ours"]),
        "--device",
        A.device,
        "--max-batch",
        str(A.max_batch),
        "--max-context",
        str(CONTEXT),
        "--num-pages",
        str(1 + pages),
        "--kv-cache-dtype",
        "bf16",
        "--capture-sizes",
        ",".join(n for n in A.sizes.split(",") if int(n) <= A.max_batch),
        *A.ours_flags.split(),
    ]


OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(server: str, path: str) -> str:
    with OPENER.open(f"http://127.0.0.1:{PORTS[server]}{path}", timeout=5) as answer:
        return bytes(answer.read()).decode()


def wait(server: str, began: float) -> bool:
    while time.time() - began < min(A.start_limit, left() + time.time() - began):
        if CHILDREN[server].poll() is not None:
            break
        try:
            get(server, "/health")
            RESULTS[f"{server}_start_s"] = round(time.time() - began, 1)
            say(f"{server} serves after {time.time() - began:.1f} s")
            return True
        except OSError:
            time.sleep(0.2)
    say(f"{server} does not serve after {time.time() - began:.1f} s")
    tail(server, 60)
    stop(server)
    return False


def first_text(server: str) -> None:
    """Show what a server makes of one prompt: the same weights, so mostly the same tokens."""
    body = {
        "model": NAME,
        "prompt": list(range(200, 264)),
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORTS[server]}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with OPENER.open(request, timeout=60) as answer:
            text = json.loads(answer.read())["choices"][0]["text"]
    except OSError as error:
        text = repr(error)
    RESULTS[f"{server}_text"] = text
    say(f"{server} says {text[:160]!r}")


def start_server(server: str) -> float:
    """Start a server and return when it began."""
    folder = checkpoint_folder()
    if server == "vllm":
        argv, env = vllm_command(folder)
        start("vllm", argv, env, W)  # not in the repository, whose folders are no modules of it
        return time.time()
    if "build" in CHILDREN:
        CHILDREN.pop("build").wait()
        say("kernels are compiled")
        tail("build", 3)
    start("ours", ours_command(folder))
    return time.time()


# ---------------------------------------------------------------- measure
def client(server: str, name: str, concurrency: int, more: list[str], limit: float) -> bool:
    argv = [
        PY,
        "-m",
        "ostinato",
        "bench",
        "serve",
        "--url",
        f"http://127.0.0.1:{PORTS[server]}",
        "--model",
        NAME,
        "--impl",
        IMPLS[server],
        "--concurrency",
        str(concurrency),
        "--vocab",
        "128000" if A.shape != "tiny" else "2304",
        "--json",
        str(W / f"{name}.json"),
        *more,
    ]
    return run(name, argv, limit, shown=8)


def shared_tokens() -> float:
    lines = get("ours", "/metrics").splitlines()
    return float(
        next(x.split()[-1] for x in lines if x.startswith("ostinato_engine_shared_tokens"))
    )


def load() -> None:
    for level in A.levels.split(","):
        concurrency, requests = map(int, level.split(":"))
        # Another seed each: a prompt of an earlier load may still be in our cache.
        flags = [
            "--requests",
            str(requests),
            "--prompt",
            *A.prompt.split(),
            "--output",
            str(A.output),
            "--seed",
            str(1000 * concurrency),
            "--warm-up",
            str(min(concurrency, 64)),
        ]
        for server in PORTS:
            if server in CHILDREN:
                client(server, f"{server}_c{concurrency}", concurrency, flags, 240)
        if "ours" in CHILDREN:
            RESULTS["shared_tokens"] = shared_tokens()
            say("tokens of prompts that ours found in its cache:", RESULTS["shared_tokens"])
        join()


def step() -> None:
    stop("vllm")  # whose idle processes take time of the CPU, which bench engine has for itself
    for batch in A.steps.split(","):
        flags = [
            "--prompt",
            "128",
            "128",
            "--output",
            *A.texts.split(),
            "--repeats",
            str(A.repeats),
        ]
        if "ours" in CHILDREN:
            client("ours", f"ours_step_b{batch}", int(batch), [*flags, "--seed", "77777"], 60)
    if "ours" in CHILDREN:
        (W / "metrics.txt").write_text(get("ours", "/metrics"))


def engine() -> None:
    for server in PORTS:
        stop(server)
    batches = A.steps.split(",")
    argv = [
        PY,
        "-m",
        "ostinato",
        "bench",
        "engine",
        "--shape",
        A.shape,
        "--dtype",
        A.dtype,
        "--lm-head",
        "bf16",
        "--batch",
        *batches,
        "--prompt",
        "128",
        "--output",
        *A.texts.split(),
        "--repeats",
        str(A.repeats),
        "--device",
        A.device,
        "--json",
        str(W / "engine.json"),
    ]
    run("engine", argv, 120, shown=6)


def join() -> None:
    ours = sorted(W.glob("ours_c*.json")) + sorted(W.glob("ours_step_b*.json"))
    theirs = sorted(W.glob("vllm_c*.json"))
    if not ours:
        return
    argv = [
        PY,
        "tests/bench/serve/serve_side_by_side.py",
        "--out",
        str(A.out / "serve.json"),
        "--dtype",
        A.dtype,
        "--ours",
        *map(str, ours),
        "--theirs",
        *map(str, theirs),
        "--note",
        "head=bf16",
        f"kv_gib={A.kv_gib:g}",
    ]
    if (W / "engine.json").exists():
        argv += ["--engine", str(W / "engine.json")]
    run("join", argv, 60, shown=12)


try:
    smi = shutil.which("nvidia-smi")
    if smi:
        start(
            "smi",
            [
                smi,
                "--query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,memory.used",
                "--format=csv,noheader",
                "-l",
                "1",
            ],
        )
    if "prepare" in A.parts:
        prepare()
    # Side by side: vLLM's takes minutes.
    began = {server: start_server(server) for server in ("vllm", "ours") if server in A.parts}
    for server in ("ours", "vllm"):
        if server in began and wait(server, began[server]):
            first_text(server)
    for part, measure in (("load", load), ("step", step), ("engine", engine), ("join", join)):
        if part in A.parts:
            measure()
finally:
    for name in list(CHILDREN):
        stop(name)
    with tarfile.open(A.out / f"logs_{A.dtype}.tar.xz", "w:xz") as tar:
        for file in sorted(W.iterdir()):
            if file.suffix in (".log", ".json", ".txt"):
                tar.add(file, file.name)
    say("done:", sorted(os.listdir(A.out)))
