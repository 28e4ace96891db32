"""Times vLLM with the plug-in beside vLLM alone, in turns on one GPU, and compares their texts.

    PYTHONPATH=FOLDER_OF_VLLM python tests/compat/vllm/run_vllm.py \\
        [--out docs/results/h200/vllm_plugin.json] [--parts step long texts ranks]

All engines of a part start at once, and are then asked in turn: each batch is timed within seconds
on the same card. Their settings are vLLM's own (torch.compile, CUDA graphs, asynchronous
scheduling), but that batches are captured which are timed, and the KV cache has a size. Parts:

- step: a decode step of the shape of Llama-3.1-8B, INT8, after prompts of 128 tokens. One engine
  has no plug-in; the others have its linear layers (with what quantises their input), its attention
  as well, its norms, too. Rows say which `parts` served, and how many graphs a step replayed.
- long: 16 layers of that shape, batch 128, where the plug-in's attention is all that differs.
  Rows of the section `attention` are of a layer at a context of 4096: of vLLM its attention's
  kernels, by its profile; ours, whatever else differs included, the same and a layer's share of
  what its step takes longer.
- texts: greedy texts of examples/tiny-llama. `step` compares texts of its engines likewise.
- ranks: two GPUs (`--tensor-parallel-size 2`): texts of tiny-llama, steps of the large shape.

vLLM alone chooses tokens; all others go on with these (vLLM's trace replay). A row says for how
many of them another engine had the same as the likeliest, and how far log probabilities were apart.
Rows without `parts` are vLLM's difference from itself: other sequences in its batches, or its eager
mode, with and without attention and linear layers in Triton.

It fails where a time or a difference is above its limit, or an engine has failed, once all rows are
written. `--build` compiles the kernels that the parts launch, and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from vllm_comparison import agreement, beside, milliseconds, missed
from vllm_process import Engines, Variant

from ostinato.bench.report import Report
from ostinato.bench.shapes import SHAPES
from ostinato.jit import compiler
from ostinato.jit.mode import BuildMode
from ostinato.jit.targets import DEFAULT
from ostinato.jit.variant import Variant as Kernel
from ostinato.ops.attention import decode_cuda, prefill_cuda
from ostinato.ops.attention.append_kv_cuda import append_kernel
from ostinato.ops.linear.precompile import layer_kernels
from ostinato.ops.linear.quantize_cuda import input_kernel

SHAPE = "llama-3.1-8b"
TINY = Path(__file__).parents[3] / "examples/tiny-llama"
PROMPT, COUNTS = 128, (32, 160)  # steps are timed between so many new tokens
LONG_BATCH, LONG_LAYERS, LONG_PROMPT, LONG_COUNTS = 128, 16, 4056, (8, 72)
LONG_CONTEXT = LONG_PROMPT + sum(LONG_COUNTS) // 2  # mean of the steps
TEXTS, TOKENS, APART = 32, 48, 5  # texts, their new tokens, and how many at a time
GIB = 2**30

_NONE = {"VLLM_PLUGINS": ""}
_OURS = {"VLLM_PLUGINS": "ostinato"}
_OUR_ATTENTION = {"attention_backend": "CUSTOM"}
_OUR_NORMS = {"ir_op_priority": {"rms_norm": ["ostinato"], "fused_add_rms_norm": ["ostinato"]}}
_THEIR_LINEARS = {
    "VLLM_DISABLED_KERNELS": "OstinatoInt8LinearKernel,OstinatoFP8LinearKernel,"
    "OstinatoFp8BlockLinearKernel"
}
# In the names of kernels: FlashAttention with its second launch, and the append to the cache.
_THEIR_ATTENTION = ("flash::", "reshape_and_cache")
PLAIN = Variant("", {}, _NONE)
# vLLM's own ways of computing the same, beside which its log probabilities are compared with ours.
OWN_WAYS = [
    Variant("", {"enforce_eager": True}, _NONE, "eager"),
    Variant(
        "",
        {"enforce_eager": True, "attention_backend": "TRITON_ATTN"},
        # The plug-in replaces linear layers too: so they differ here as well.
        _NONE | {"VLLM_DISABLED_KERNELS": "CutlassInt8ScaledMMLinearKernel"},
        "eager, attention and linear layers in Triton",
    ),
]
LINEARS = Variant("linears", {}, _OURS)
ATTENTION = Variant("linears, attention", _OUR_ATTENTION, _OURS)
ALL = Variant("linears, attention, norms", _OUR_ATTENTION | _OUR_NORMS, _OURS)
ATTENTION_ALONE = Variant("attention", _OUR_ATTENTION, _OURS | _THEIR_LINEARS)


class Run:
    """The parts that a command line names.

    Args:
        options: of the command line.
        folder: for checkpoints, caches and logs.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.failed: list[str] = []
        self.report = Report.for_device(
            torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
        self.report.versions["vllm"] = metadata.version("vllm")
        self.peer = f"vllm_{metadata.version('vllm')}"
        self.vocab: int = SHAPES[SHAPE]["vocab_size"]

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, print it and write the file, so that what ends early loses nothing."""
        print(json.dumps(row), flush=True)
        self.report.rows.append(row)
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.report.write(self.options.out)

    def engines(self, part: str, variants: Sequence[Variant], arguments: dict[str, Any]) -> Engines:
        """Start engines."""
        return Engines(
            variants,
            {**self._common(), **arguments},
            self.folder / part,
            start_seconds=self.options.start_seconds,
            ask_seconds=self.options.ask_seconds,
        )

    def _common(self) -> dict[str, Any]:
        sizes = sorted({1, 8, 32, *self.options.batches})
        return {
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "generation_config": "vllm",
            "seed": 0,
            "max_num_seqs": max(sizes),
            "enable_prefix_caching": False,
            "enable_trace_replay": True,
            "gpu_memory_utilization": 0.1,  # is not looked at where the cache has a size
            "compilation_config": {"cudagraph_capture_sizes": sizes},
        }

    def large(self, layers: int, **arguments: Any) -> dict[str, Any]:
        """Return arguments for a model of the large shape with random weights."""
        folder = self.folder / f"{SHAPE}_{layers}"
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            **SHAPES[SHAPE],
            "num_hidden_layers": layers,
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "quantization_config": json.loads((TINY / "config.json").read_text())[
                "quantization_config"
            ],
        }
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return {"model": str(folder), "load_format": "seeded", **arguments}

    def step(self) -> None:
        """Time steps at each batch, and compare texts."""
        arguments = self.large(
            self.options.layers, max_model_len=4096, kv_cache_memory_bytes=6 * GIB
        )
        variants = [PLAIN, LINEARS, ATTENTION, ALL]
        with self.engines("step", [*variants, *OWN_WAYS], arguments) as engines:
            self.steps(engines, variants)
            draw = random.Random(0)
            prompts = [
                [draw.randrange(self.vocab) for _ in range(draw.randrange(16, 200))]
                for _ in range(TEXTS)
            ]
            self.compare(engines, f"{SHAPE} {TEXTS} x {TOKENS}", prompts)
            for batch in self.options.profile:
                self.kernels(engines, [PLAIN, ALL], batch, PROMPT)
            self.failed += engines.failed

    def steps(self, engines: Engines, variants: Sequence[Variant], **fields: Any) -> None:
        """Time steps of engines in turn."""
        for batch in self.options.batches:
            given = {"batch": batch, "prompt": PROMPT, "vocab": self.vocab, "same": False}
            case = {"section": "step", "case": f"{SHAPE} b{batch} prompt{PROMPT}", **fields}
            self._times(engines, variants, given, COUNTS, {**case, "batch": batch})

    def _times(
        self,
        engines: Engines,
        variants: Sequence[Variant],
        given: dict[str, Any],
        counts: tuple[int, int],
        case: dict[str, Any],
    ) -> dict[Variant, float]:
        """Time the same step of engines in turn, add their rows, and return microseconds."""
        answers: dict[Variant, list[Any]] = {variant: [] for variant in variants}
        for variant in variants:
            engines.ask(variant, "step", **given, counts=(counts[0], counts[0] + 1))
        for _ in range(self.options.repeats):
            for variant in variants:
                if (answer := engines.ask(variant, "step", **given, counts=counts)) is not None:
                    answers[variant].append(answer)
        found = {}
        for variant, timed in answers.items():
            if not timed:
                continue
            found[variant] = us = milliseconds(timed, counts[1] - counts[0]) * 1e3
            row = {**case, "dtype": "int8", "impl": "ostinato_int8" if variant.parts else self.peer}
            row |= {"parts": variant.parts} if variant.parts else {}
            row["us"] = round(us, 1)
            if "ranks" not in case:  # whose graphs are in other processes
                row["replays"] = round(timed[-1]["replays"], 2)
            if variant.parts and PLAIN in found:
                row = beside(row, self.peer, found[PLAIN])
            self.add(row)
        return found

    def long(self) -> None:
        """Time attention to long contexts, by the steps of fewer layers."""
        length = LONG_PROMPT + LONG_COUNTS[1] + 96  # vllm_engine: _MARGIN
        arguments = self.large(
            LONG_LAYERS,
            max_model_len=-(-length // 256) * 256,
            kv_cache_memory_bytes=36 * GIB,
            enable_prefix_caching=True,
            max_num_seqs=LONG_BATCH,
            compilation_config={"cudagraph_capture_sizes": [1, LONG_BATCH]},
        )
        variants = [PLAIN, ATTENTION_ALONE]
        with self.engines("long", variants, arguments) as engines:
            given = {"batch": LONG_BATCH, "prompt": LONG_PROMPT, "vocab": self.vocab, "same": True}
            case = f"{SHAPE} {LONG_LAYERS} layers b{LONG_BATCH} ctx{LONG_CONTEXT}"
            section = {"section": "step", "case": case}
            step = self._times(engines, variants, given, LONG_COUNTS, section)
            profiles = self.kernels(engines, variants, LONG_BATCH, LONG_PROMPT)
            theirs = sum(
                kernel["us"]
                for kernel in profiles[PLAIN]
                if any(name in kernel["name"] for name in _THEIR_ATTENTION)
            )
            if not theirs:
                self.failed.append("the profile of vLLM alone has no attention")
            elif PLAIN in step and ATTENTION_ALONE in step:
                ours = theirs + step[ATTENTION_ALONE] - step[PLAIN]
                case = f"{SHAPE} b{LONG_BATCH} ctx{LONG_CONTEXT}"
                row: dict[str, Any] = {"section": "attention", "case": case, "dtype": "bf16"}
                self.add({**row, "impl": self.peer, "us": round(theirs / LONG_LAYERS, 1)})
                row |= {"impl": "ostinato_p16", "us": round(ours / LONG_LAYERS, 1)}
                self.add(beside(row, self.peer, theirs / LONG_LAYERS))
            self.failed += engines.failed

    def texts(self) -> None:
        """Compare texts of a trained checkpoint."""
        arguments = {"model": str(TINY), "kv_cache_memory_bytes": GIB}
        with self.engines("texts", [PLAIN, *OWN_WAYS, ALL], arguments) as engines:
            self.compare(engines, f"tiny-llama {TEXTS} x {TOKENS}", trained_prompts())
            self.failed += engines.failed

    def ranks(self) -> None:
        """Do both on two GPUs."""
        two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        arguments = {"model": str(TINY), "kv_cache_memory_bytes": GIB, **two}
        with self.engines("ranks", [PLAIN, *OWN_WAYS, ALL], arguments) as engines:
            case = f"tiny-llama {TEXTS} x {TOKENS} tp2"
            self.compare(engines, case, trained_prompts())
            self.failed += engines.failed
        # Workers are processes of their own, which know no other loader than vLLM's.
        arguments = self.large(
            self.options.layers, max_model_len=4096, kv_cache_memory_bytes=6 * GIB, **two
        )
        with self.engines("ranks_step", [PLAIN, ALL], {**arguments, "load_format": "dummy"}) as e:
            self.steps(e, [PLAIN, ALL], ranks=2)
            self.failed += e.failed

    def compare(self, engines: Engines, case: str, prompts: list[list[int]]) -> None:
        """Compare texts of all engines with those of vLLM alone, and vLLM's with its own."""
        given = {"prompts": prompts, "count": TOKENS}
        chosen = engines.ask(PLAIN, "texts", **given, groups=len(prompts), forced=None)
        if chosen is None:
            return
        given["forced"] = forced = [text["tokens"] for text in chosen]
        for variant in engines.running():
            # An eager step takes long.
            for groups in (len(prompts),) if variant in OWN_WAYS else (len(prompts), APART):
                answer = engines.ask(variant, "texts", **given, groups=groups)
                if answer is None:
                    break
                row = {"section": "texts", "case": case, "at_a_time": groups}
                row["impl"] = "ostinato_int8" if variant.parts else self.peer
                row |= {"parts": variant.parts} if variant.parts else {}
                row |= {"differs": variant.differs} if variant.differs else {}
                self.add({**row, "peer": self.peer, **agreement(chosen, answer)})
            if variant.parts:
                free = engines.ask(
                    variant,
                    "texts",
                    prompts=prompts,
                    count=TOKENS,
                    groups=len(prompts),
                    forced=None,
                )
                equal = sum(
                    text["tokens"] == tokens
                    for text, tokens in zip(free or [], forced, strict=False)
                )
                print(
                    f"{case}, {variant}: {equal} of {len(prompts)} texts are the same", flush=True
                )

    def kernels(
        self, engines: Engines, variants: Sequence[Variant], batch: int, prompt: int
    ) -> dict[Variant, list[dict[str, Any]]]:
        """Print and return which kernels a step of each engine has, none of one that failed."""
        given = {"batch": batch, "prompt": prompt, "vocab": self.vocab}
        found: dict[Variant, list[dict[str, Any]]] = {}
        for variant in variants:
            found[variant] = engines.ask(variant, "kernels", **given) or []
            for kernel in found[variant]:
                print(f"b{batch} prompt{prompt}, {variant}: {json.dumps(kernel)}", flush=True)
        return found


def trained_prompts() -> list[list[int]]:
    """Return prompts of what tiny-llama was trained on, English about Python, as tokens."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    names = [name for name in sorted(dir(str)) if not name.startswith("_")]
    texts = [getattr(str, name).__doc__ for name in names][:TEXTS]
    return [tokenizer.encode(text).ids[: 8 + 6 * i] for i, text in enumerate(texts)]


def kernels() -> Iterator[Kernel]:
    """Yield the kernels that the parts launch on an H100 or H200 (not those of `ranks`)."""
    bf16, int8 = torch.bfloat16, torch.int8
    tiny = json.loads((TINY / "config.json").read_text())
    for config in (SHAPES[SHAPE], tiny):
        hidden, wide, dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
        q, kv = (config[f"num_{k}_heads"] * dim for k in ("attention", "key_value"))
        for shape in ((q + 2 * kv, hidden), (hidden, q), (2 * wide, hidden), (hidden, wide)):
            yield from layer_kernels("per_token", shape, int8, bf16)
        decodes = decode_cuda.decode_kernels(bf16, dim, q // kv, batch_invariant=False)
        yield from (kernel for kernel in decodes if kernel.copy_pages)
        yield from prefill_cuda.prefill_kernels(bf16, dim, batch_invariant=False)
    yield append_kernel(bf16, bf16)
    yield input_kernel("silu_mul", bf16, int8)
    yield input_kernel("rms_norm", bf16, bf16)


def main() -> None:
    """Run the parts, and say what is above its limit."""
    parts: dict[str, Callable[[Run], None]] = {
        "step": Run.step,
        "long": Run.long,
        "texts": Run.texts,
        "ranks": Run.ranks,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=parts, default=["step", "long", "texts"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--layers", type=int, default=SHAPES[SHAPE]["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", nargs="*", type=int, default=[1, 128], help="batches")
    parser.add_argument("--start-seconds", type=float, default=300, help="for engines to start")
    parser.add_argument("--ask-seconds", type=float, default=90, help="for each answer")
    parser.add_argument("--folder", type=Path, help="for logs and caches, which are kept")
    parser.add_argument("--build", action="store_true", help="compile kernels for sm_90a, and end")
    options = parser.parse_args()
    if options.build:
        mode = BuildMode.from_environment()
        compiler.build([compiler.plan(kernel, mode, DEFAULT) for kernel in {*kernels()}])
        return
    with tempfile.TemporaryDirectory() as name:
        run = Run(options, options.folder or Path(name))
        for part in options.parts:
            parts[part](run)
    rows = [row for row in run.report.rows if isinstance(row, dict)]
    above = missed(rows, ALL.parts) + run.failed
    if above:
        sys.exit("\n".join(above))


if __name__ == "__main__":
    main()
