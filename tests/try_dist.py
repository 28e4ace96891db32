"""Tries what `make dist` made, in the empty environment into which it installed the wheel.

    build/dist/venv/bin/python -I tests/try_dist.py DIST CHECKPOINT

DIST is the folder of sdist and wheel, CHECKPOINT that of a W8A8 checkpoint of the repository.
Checks the names of the files and the headers of CUTLASS, then runs `ostinato generate` on the
checkpoint, and `ostinato quantize` on a 16-bit copy of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import ostinato
from ostinato.jit.toolchain import require_cutlass

# PyPI refuses a plain linux_x86_64: https://packaging.python.org/specifications/platform-compatibility-tags
_WHEEL = re.compile(r"ostinato-{version}-(cp3\d+)-\1-manylinux_2_\d+_(x86_64|aarch64)\.whl")
_PROMPT = "A list display is"


def check_names(dist: Path) -> None:
    """Fail unless `dist` holds one sdist and one manylinux wheel of this version."""
    found = {path.suffix: path.name for path in dist.iterdir()}
    wheel = _WHEEL.pattern.replace("{version}", re.escape(ostinato.__version__))
    if len(list(dist.iterdir())) != 2 or not re.fullmatch(wheel, found.get(".whl", "")):
        raise SystemExit(f"{dist}: got {sorted(found.values())}, expected an sdist and {wheel}")
    if found.get(".gz") != f"ostinato-{ostinato.__version__}.tar.gz":
        raise SystemExit(f"{dist}: got {found.get('.gz')}, expected version {ostinato.__version__}")


def check_cutlass() -> None:
    """Fail unless the wheel itself has the headers of CUTLASS, and their licence."""
    include = require_cutlass().include
    if not include.is_relative_to(Path(ostinato.__file__).parent):
        raise SystemExit(f"headers of CUTLASS: got {include}, expected them in the wheel")
    if not (include / "cute" / "arch" / "mma_sm90_gmma.hpp").is_file():
        raise SystemExit(f"{include}: got no mma_sm90_gmma.hpp, expected what the kernels include")
    licences = [path.name for path in importlib.metadata.files("ostinato") or []]
    if not {"LICENSE", "LICENSE.txt"} <= set(licences):
        raise SystemExit("licences: expected those of ostinato and CUTLASS in the wheel")


def run(*arguments: str) -> str:
    """Run the installed console script and return its standard output."""
    script = Path(sysconfig.get_path("scripts")) / "ostinato"
    command = [script, *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def widen(checkpoint: Path, to: Path) -> None:
    """Write a bf16 copy of a W8A8 checkpoint."""
    shutil.copytree(checkpoint, to)
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        weight = name.removesuffix("_scale")
        tensors[weight] = (tensors[weight].float() * tensors.pop(name).float()).bfloat16()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    """Run all checks; the first that fails ends the process with its message."""
    dist, checkpoint = (Path(argument).resolve() for argument in sys.argv[1:])
    package = Path(ostinato.__file__)
    if not package.is_relative_to(sys.prefix):
        raise SystemExit(f"ostinato: imported from {package}, expected it below {sys.prefix}")
    check_names(dist)
    check_cutlass()
    assert run("--version") == f"ostinato {ostinato.__version__}\n"
    with tempfile.TemporaryDirectory() as folder:
        wide, narrow = Path(folder, "wide"), Path(folder, "narrow")
        widen(checkpoint, wide)
        run("quantize", str(wide), str(narrow), "--scheme", "int8")
        for model in (checkpoint, wide, narrow):
            text = run("generate", str(model), _PROMPT, "--max-tokens", "16")
            if not text.strip():
                raise SystemExit(f"generate {model}: got {text!r}, expected a text")
            print(_PROMPT + text.rstrip())
    print(f"ostinato {ostinato.__version__} works with torch {torch.__version__}")


if __name__ == "__main__":
    main()
