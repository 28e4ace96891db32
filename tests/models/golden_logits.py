"""Logits and greedy texts of tiny models: every weight format, dtype and RoPE type.

Run before and after a change that must not change a bit, on one machine:

    python tests/models/golden_logits.py FILE           # writes digests and tokens
    python tests/models/golden_logits.py --compare FILE  # exits with 1 where one differs
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "checkpoint")]

from hf_models import MODELS, TOKENS, random_model, save_plain  # noqa: E402
from quantized_files import FORMATS, write_quantized  # noqa: E402

from ostinato.checkpoint import load_model  # noqa: E402
from ostinato.engine import Engine, SamplingParams  # noqa: E402
from ostinato.models import sequence_logits  # noqa: E402
from tiny import byte_tokenizer  # noqa: E402

# The families that began it; the logits of all are compared with those of transformers.
NAMES = [n for n in MODELS if n.split("-")[0] in ("llama", "mistral", "qwen2", "qwen3")]
NAMES.remove("llama-longrope")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Families whose quantised layers have biases, norms of q and k, and windows.
QUANTIZED = ("llama", "llama-biases", "mistral-window", "qwen2", "qwen3")
TIED_FORMATS = ("ct-int8-dynamic", "hf-fp8-static", "modelopt-fp8")
PROMPT = [3, 41, 17, 8, 60, 22, 9]


def machine() -> str:
    """Return what the bits of a sum on the CPU depend on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [row for row in info.read_text().splitlines() if row.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def models(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, loaded model), one at a time."""
    for name in NAMES:
        config = MODELS[name]
        plain = random_model(config)
        save_plain(folder / name, plain)
        for dtype_name, dtype in DTYPES.items():
            yield f"{name} {dtype_name}", load_model(folder / name, dtype=dtype)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            head = load_model(folder / name, lm_head_dtype=dtype)
            yield f"{name} fp32, lm_head {dtype}", head
        if name in QUANTIZED or config.tie_word_embeddings:
            for form in FORMATS if name in QUANTIZED else TIED_FORMATS:
                where = folder / f"{name}-{form}"
                write_quantized(where, plain, FORMATS[form])
                yield f"{name} {form}", load_model(where)


def outcome(model: Any) -> dict[str, Any]:
    """Return a digest of a prompt's logits, a few of them, and a greedy text of the engine."""
    logits = sequence_logits(model, TOKENS)
    engine = Engine(model, byte_tokenizer(), max_batch=2, page_size=4, num_pages=40)
    engine.capture([2], progress=False, verify=False)
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = engine.generate([PROMPT, PROMPT[::-1]], greedy)
    return {
        "digest": hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest(),
        "logits": [round(value, 3) for value in logits[-1, :6].tolist()],
        "texts": [list(text.token_ids) for text in texts],
    }


def outcomes() -> dict[str, dict[str, Any]]:
    """Return the outcome of every model by its name."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return {name: outcome(model) for name, model in models(Path(folder))}


def main() -> int:
    compares, file = sys.argv[1] == "--compare", Path(sys.argv[-1])
    found: dict[str, Any] = {"machine": machine(), "models": outcomes()}
    if compares:
        before = json.loads(file.read_text(encoding="utf-8"))
        if before["machine"] != found["machine"]:
            print(f"written on another machine: {before['machine']}")
        differing = [n for n, row in before["models"].items() if row != found["models"].get(n)]
        print(f"{len(before['models'])} models, {len(differing)} differ: {differing}")
        return int(bool(differing))
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found["models"].items()]
    text = f'{{"machine": {json.dumps(found["machine"])},\n"models": {{\n'
    text += ",\n".join(rows) + "\n}}\n"
    file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
