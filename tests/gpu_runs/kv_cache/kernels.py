"""Prints the names of the kernels that run.sh launches, for `ostinato build --only`.

    python kernels.py FOLDER

They are those of Llama-3.1-8B in INT8 with an output projection of 16 bits, over KV caches of
bf16, fp8 and int8 in pages of 16. It needs the package ostinato, but no GPU, and writes the
config.json of that model into FOLDER, in the format of compressed-tensors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal

from ostinato.bench.shapes import SHAPES
from ostinato.cli.build import _model_kernels
from ostinato.models import kv_format, read_config
from ostinato.models.required_kernels import model_kernels

CACHES: tuple[tuple[str, Literal["static", "token"] | None], ...] = (
    ("bf16", None),
    ("fp8", "static"),
    ("fp8", "token"),
    ("int8", "token"),
)


def write_config(folder: Path) -> None:
    """Write the model's config.json."""
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    document = {
        **SHAPES["llama-3.1-8b"],
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": quantization,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where config.json is written")
    folder = parser.parse_args().folder
    write_config(folder)
    config = read_config(SHAPES["llama-3.1-8b"])
    found = set()
    for dtype, scales in CACHES:
        found |= _model_kernels(
            folder, lm_head=None, batch_invariant=True, kv_cache_dtype=dtype, kv_scales=scales
        )
        # `bench decode` and `bench prefill` call the ops as they are by default.
        cache = kv_format(config, None, dtype, scales)
        found |= set(model_kernels(config, cache_format=cache, batch_invariant=False))
    print(*sorted(kernel.name for kernel in found), sep="\n")


if __name__ == "__main__":
    main()
