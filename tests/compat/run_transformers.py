"""Times `generate` of a W8A8 checkpoint in transformers, as it is and accelerated, at batch 1.

    python tests/compat/run_transformers.py [--out docs/results/h100/transformers.json]

The checkpoint has some layers of the shape of Llama-3.1-8B, random weights, and INT8 linear
layers. Times are per token: of 129 new tokens less those of one, by 128, the median of three.
Implementations:

- transformers: `generate` as it comes, and with a static cache, for which transformers compiles the
  step and replays it from graphs;
- ostinato: the same two calls of an accelerated model, and a step captured by a GraphRunner with a
  `RaggedStaticCache`.

A row of the section "logits" has relative errors in place of a time: of the accelerated model's
logits beside transformers', and, as `limit`, of transformers' beside those of the 16-bit model. It
fails where the first is larger, or where the accelerated step with a static cache is not three
times as fast as `generate` as it comes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ostinato.bench.report import Report
from ostinato.bench.shapes import SHAPES
from ostinato.checkpoint import quantize_checkpoint
from ostinato.compat.transformers import RaggedStaticCache, accelerate
from ostinato.graphs import BufferSpec, GraphRunner, StaticBuffers

PROMPT, NEW, REPEATS, LEAST = 128, 128, 3, 3.0
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_checkpoints(folder: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """Write a random model in bf16 and in INT8, and return their folders."""
    fields = {k: v for k, v in SHAPES["llama-3.1-8b"].items() if k != "dtype"}
    fields |= {"num_hidden_layers": options.layers, **(SMALL if options.small else {})}
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = LlamaForCausalLM(LlamaConfig(**fields, bos_token_id=1, eos_token_id=2))
    torch.set_default_dtype(before)
    model.save_pretrained(folder / "bf16")
    del model
    quantize_checkpoint(
        folder / "bf16", folder / "int8", scheme="int8", device=options.device, progress=False
    )
    return folder / "bf16", folder / "int8"


def load(folder: Path, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to(device).eval()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_per_token(run: Callable[[int], Any], device: str) -> float:
    """Return the median time of a token, of calls that make 1 and 1 + NEW tokens."""
    run(1 + NEW)  # compiles and captures; its static cache is large enough for all
    run(1)
    found = []
    for _ in range(REPEATS):
        times = []
        for count in (1, 1 + NEW):
            synchronize(device)
            start = time.perf_counter()
            run(count)
            synchronize(device)
            times.append(time.perf_counter() - start)
        found.append((times[1] - times[0]) / NEW)
    return statistics.median(found)


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Callable[[int], Any]:
    def run(count: int) -> Any:
        fixed = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
        return model.generate(ids, **fixed, **options)

    return run


def captured(model: Any, ids: torch.Tensor) -> Callable[[int], Any]:
    """Return a loop of replays of a step that a GraphRunner has captured."""
    cache = RaggedStaticCache(model, max_batch=1, max_length=PROMPT + NEW + 16)

    def step(batch: Any) -> dict[str, torch.Tensor]:
        rows = cache.rows(batch.seq_lens)
        logits = model(
            batch.tokens[:, None], past_key_values=rows, position_ids=rows.position_ids
        ).logits
        return {"tokens": logits[:, -1].argmax(-1)}

    def example(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(1, PROMPT, shape, generator=generator, dtype=torch.int32)

    specs = {
        "tokens": BufferSpec((), torch.int64, pad=0),
        "seq_lens": BufferSpec((), torch.int32, pad=0, example=example),
    }
    buffers = StaticBuffers(specs, max_batch=1, device=ids.device)
    runner = GraphRunner(step, buffers, memory={"model": model, "cache": cache.tensors()})
    print(runner.capture())

    @torch.no_grad()
    def run(count: int) -> list[int]:
        lens = torch.tensor([PROMPT], dtype=torch.int32, device=ids.device)
        rows = cache.rows(lens, tokens=PROMPT)
        logits = model(ids, past_key_values=rows, position_ids=rows.position_ids).logits
        tokens = [logits[:, -1].argmax(-1)]
        for _ in range(count - 1):
            lens = lens + 1
            out = runner.run(1, {"tokens": tokens[-1], "seq_lens": lens})
            tokens.append(out["tokens"].clone())
        return torch.cat(tokens).tolist()

    return run


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny layers, to try the script")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    report = Report.for_device(torch.device(options.device))
    report.versions["transformers"] = transformers.__version__
    case = f"llama-3.1-8b {options.layers} layers b1 prompt{PROMPT}"
    times: dict[str, float] = {}

    def add(row: dict[str, Any]) -> None:
        """Print a row and write the file, so that a run which ends early loses nothing."""
        print(row, flush=True)
        report.rows.append(row)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            report.write(options.out)

    def time_of(impl: str, run: Callable[[int], Any]) -> None:
        times[impl] = seconds = seconds_per_token(run, options.device)
        row: dict[str, Any] = {"section": "generate", "case": case, "impl": impl}
        row |= {"dtype": "int8", "us": round(seconds * 1e6, 1)}
        if impl.startswith("transformers"):
            add(row)
            return
        for peer in ("transformers", "transformers_static"):
            add({**row, "peer": peer, "ratio": round(seconds / times[peer], 4)})

    with tempfile.TemporaryDirectory() as name:
        bf16, int8 = write_checkpoints(Path(name), options)
        model = load(bf16, options.device)
        ids = torch.randint(3, model.config.vocab_size, (1, PROMPT)).to(options.device)
        in_16_bits = model(ids).logits
        del model
        model = load(int8, options.device)
        theirs = model(ids).logits
        time_of("transformers", generate(model, ids))
        time_of("transformers_static", generate(model, ids, cache_implementation="static"))
        del model
        torch._dynamo.reset()
        gc.collect()
        model = load(int8, options.device)
        print(accelerate(model))
        error = difference(model(ids).logits, theirs)
        limit = difference(theirs, in_16_bits)
        row = {"section": "logits", "case": case, "impl": "ostinato", "peer": "transformers"}
        add({**row, "error": round(error, 5), "limit": round(limit, 5)})
        time_of("ostinato", generate(model, ids))
        time_of("ostinato_static", generate(model, ids, cache_implementation="static"))
        time_of("ostinato_graph", captured(model, ids))
    if not error <= limit:
        sys.exit(f"logits: got an error of {error:.4f}, expected at most {limit:.4f}")
    if options.device == "cuda" and times["ostinato_static"] * LEAST > times["transformers"]:
        sys.exit(f"got {times}, expected ostinato_static three times as fast as transformers")


if __name__ == "__main__":
    main()
