"""Which architectures load, and what was checked of each.

    python tests/models/survey.py

makes a random tiny model of every architecture with transformers, loads it and compares; it writes
`docs/results/models.json` and the tables of `docs/models.md`. It takes two minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "checkpoint")]

from greedy_texts import greedy_texts  # noqa: E402
from hf_models import MODELS, SHAPE, TOKENS, hf_logits, random_model, save_plain  # noqa: E402
from quantized_files import FORMATS, sturdy_tokens, write_quantized  # noqa: E402

from ostinato.checkpoint import load_model, quantize_checkpoint  # noqa: E402
from ostinato.models import UnsupportedModelError, read_config, sequence_logits  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, PAGE = DOCS / "results" / "models.json", DOCS / "models.md"
LIMIT = 1e-4

_MINISTRAL = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
# Beside those of the tests.
VARIATIONS: dict[str, transformers.PreTrainedConfig] = {
    "llama-attention-bias": transformers.LlamaConfig(**SHAPE, attention_bias=True),
    "llama-mlp-bias": transformers.LlamaConfig(**SHAPE, mlp_bias=True),
    "llama-pretraining-tp": transformers.LlamaConfig(**SHAPE, pretraining_tp=2),
    "qwen2-window": transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3-window": transformers.Qwen3Config(
        **SHAPE, head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3-biases": transformers.Qwen3Config(**SHAPE, head_dim=16, attention_bias=True),
    "ministral-window": transformers.MinistralConfig(**{**SHAPE, **_MINISTRAL}),
    "mistral3-ministral3": transformers.Mistral3Config(
        text_config=MODELS["ministral3"].to_dict(),
        vision_config=MODELS["mistral3"].vision_config.to_dict(),
        tie_word_embeddings=False,
    ),
}
CONFIGS = {**MODELS, **VARIATIONS}

# The 89 configurations with which issue 41 began: a model of `CONFIGS`, or the model_type of one
# that is refused.
SURVEYED = (
    *("llama", "llama-attention-bias", "llama-mlp-bias", "llama-tied", "llama-head-dim"),
    *("llama-pretraining-tp", "mistral", "mistral-window", "qwen2", "qwen2-window", "qwen3"),
    *("qwen3-window", "qwen3-biases", "internlm3", "iquestcoder", "seed_oss", "ministral"),
    *("ministral-window", "phi3", "phi3-window", "phi3-mini", "qwen2_vl", "qwen2_5_vl"),
    *("qwen3_vl", "mistral3", "mistral3-ministral3", "ministral3", "llava", "cwm", "granite_swa"),
    *("smollm3", "granite", "ernie4_5", "helium", "olmo2", "olmo3", "exaone4", "glm", "glm4"),
    *("hunyuan_v1_dense", "stablelm", "phi", "gemma", "gemma2", "gemma3_text", "gemma3"),
    *("gemma4_text", "cohere", "cohere2", "nemotron", "arcee", "jais2", "nanochat", "apertus"),
    *("starcoder2", "gpt2", "gpt_neox", "falcon"),
    *("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "granitemoe", "ernie4_5_moe"),
    *("hunyuan_v1_moe", "phimoe", "qwen3_vl_moe", "glm4_moe", "minimax_m2", "dots1", "gpt_oss"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "granitemoehybrid", "falcon_h1"),
    *("lfm2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
    *("minicpm3", "youtu", "llama4_text", "minimax", "qwen4_exp_text", "kimi_linear"),
)
CASES = (*SURVEYED, *(name for name in CONFIGS if name not in SURVEYED))


def refusal(config: Mapping[str, Any]) -> str | None:
    """Return what `read_config` says against a configuration, None if nothing."""
    try:
        read_config(config)
    except UnsupportedModelError as error:
        return str(error).partition(", expected")[0]
    return None


def row(name: str) -> dict[str, Any]:
    """Return what was found out about a case."""
    begin = {"case": name, "surveyed": name in SURVEYED}
    if name not in CONFIGS:
        refused = refusal(CONFIG_MAPPING[name]().to_dict())
        if refused is None:
            raise SystemExit(f"{name} is not refused: hf_models.py must have a model of it")
        return {**begin, "model_type": name, "loads": False, "refused": refused}
    config = CONFIGS[name]
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = greedy_texts(config, Path(folder) / "text")
        plain = random_model(config)
        loaded = load_model(save_plain(Path(folder) / "plain", plain))
        error = (sequence_logits(loaded, TOKENS) - hf_logits(plain)).abs().max()
        return {
            **begin,
            "model_type": config.model_type,
            "architecture": type(plain).__name__,
            "loads": True,
            "max_error": digits(error),
            **{
                f"max_error_{scheme}": twin_error(plain, scheme, Path(folder))
                for scheme in ("int8", "fp8")
            },
            "greedy_texts_equal": ours == theirs,
        }


def twin_error(plain: transformers.PreTrainedModel, scheme: str, folder: Path) -> float:
    """Return how far our quantiser's model is from a fake-quantised one of transformers."""
    form = FORMATS[f"ct-{scheme}-dynamic"]
    twin = write_quantized(folder / f"twin-{scheme}", plain, form).twin()
    tokens = sturdy_tokens(twin)
    quantize_checkpoint(folder / "plain", folder / scheme, scheme=scheme, progress=False)
    ours = sequence_logits(load_model(folder / scheme), tokens)
    return digits((ours - hf_logits(twin, tokens)).abs().max())


def digits(error: torch.Tensor) -> float:
    return float(f"{float(error):.1e}")


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many of the surveyed configurations load."""
    surveyed = [item for item in rows if item["surveyed"]]
    return {"surveyed": len(surveyed), "load": sum(item["loads"] for item in surveyed)}


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the tables of `docs/models.md`."""
    counts = summary(rows)
    lines = [
        f"{counts['load']} of {counts['surveyed']} surveyed configurations load, and "
        f"{sum(item['loads'] for item in rows)} of {len(rows)} with those that only tests have.",
        "",
        "| model | architecture | fp32 | INT8 | FP8 | texts |",
        "|---|---|---|---|---|---|",
    ]
    for item in filter(lambda item: item["loads"], rows):
        errors = [f"{item[key]:.1e}" for key in ("max_error", "max_error_int8", "max_error_fp8")]
        texts = "equal" if item["greedy_texts_equal"] else "differ"
        cells = [f"`{item['case']}`", item["architecture"], *errors, texts]
        lines.append(f"| {' | '.join(cells)} |")
    refused = [f"`{item['case']}`" for item in rows if not item["loads"]]
    return "\n".join([*lines, "", f"Refused by name: {', '.join(refused)}."])


def page(text: str, rows: list[dict[str, Any]]) -> str:
    """Return the page with its tables replaced."""
    begin, end = "<!-- survey: begin -->\n", "<!-- survey: end -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{tables(rows)}\n\n{end}{tail}"


def main() -> int:
    torch.set_num_threads(1)
    rows = [row(name) for name in CASES]
    found = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "counts": summary(rows),
    }
    text = ",\n".join(f"  {json.dumps(item)}" for item in rows)
    head = json.dumps(found)[:-1]
    RESULTS.write_text(f'{head}, "rows": [\n{text}\n]}}\n', encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(f"{RESULTS} and {PAGE}: {summary(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
