"""Python blocks and commands of the pages of docs/ run as written, on a CPU."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from page_blocks import code_blocks

from ostinato.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "csrc").rglob("*.md"), *(ROOT / "docs").rglob("*.md")])
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
# Pages whose blocks are run by a test of their own, which follows them.
FOLLOWED = {
    "README.md": "tests/test_readme.py",
    "docs/getting-started.md": "tests/test_readme.py",
    "docs/how-to/add-a-model.md": "tests/models/test_models_add_a_model.py",
    "docs/how-to/add-a-weight-format.md": "tests/checkpoint/test_checkpoint_add_a_format.py",
    "docs/how-to/add-an-architecture.md": "tests/ops/common/test_ops_architectures.py",
    "docs/how-to/add-an-op.md": "tests/ops/test_ops_add_an_op.py",
    "docs/integrations/flash-attn.md": "tests/compat/test_compat_pages.py",
    "docs/integrations/torch-compile.md": "tests/compat/test_compat_pages.py",
    "docs/integrations/transformers.md": "tests/compat/test_compat_pages.py",
    "docs/tensor-parallel.md": "tests/parallel/test_parallel_commands.py",
}
# What a page takes as known: code that runs before each of its blocks, in one namespace.
# None: another test runs the block.
BEFORE: dict[str, list[str | None]] = {
    "docs/graphs/index.md": [
        """
import torch
from ostinato.graphs import Variant

max_pages, dummy_page = 2, 0
table = torch.zeros(3, max_pages, dtype=torch.int32)

def random_tokens(generator, shape):
    return torch.randint(10, shape, generator=generator)

def step(batch):
    return batch.tokens * 2
""",
        None,  # tests/graphs/test_graphs_standalone.py
        """
runner = GraphRunner(step, StaticBuffers({"tokens": specs["tokens"]}, max_batch=64, device="cpu"))
inputs = {"tokens": [5, 9, 2]}
""",
    ],
    "docs/graphs/bursts.md": [
        """
import torch
from ostinato.graphs import Add, BufferSpec, BurstRules, Feed, GraphRunner, Slot, StaticBuffers

specs = {
    "tokens": BufferSpec((), torch.int64, pad=0),
    "positions": BufferSpec((), torch.int64, pad=0),
    "seq_lens": BufferSpec((), torch.int32, pad=0),
    "slot_mapping": BufferSpec((), torch.int64, pad=-1),
    "page_table": BufferSpec((8,), torch.int32, pad=-1),
}
buffers = StaticBuffers(specs, max_batch=4, device="cpu")
n = 3
inputs = {
    "tokens": [5, 9, 4],
    "positions": [0, 0, 0],
    "seq_lens": [1, 1, 1],
    "slot_mapping": [0, 128, 256],
    "page_table": torch.arange(24, dtype=torch.int32).view(3, 8),
}

def step(batch):
    return {"tokens": batch.tokens + 1}
"""
    ],
    "docs/graphs/transformers.md": [
        """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()
ids = torch.randint(50, (3, 6))
seq_lens = torch.tensor([6, 4, 1], dtype=torch.int32)
"""
    ],
    "docs/kv-cache.md": [
        f"""
from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.engine import Engine

folder = "{ROOT / "examples" / "tiny-llama"}"
model, tokenizer = load_model(folder), load_tokenizer(folder)
"""
    ],
    "docs/moe.md": [""],
    "docs/w8a8.md": [
        """
import torch
from ostinato import ops

w, x = torch.ones(64, 128, dtype=torch.int8), torch.randn(3, 128, dtype=torch.bfloat16)
w_scale, bias = torch.ones(64), torch.zeros(64)
""",
        """
q_blocks, k_blocks = torch.ones(32, 1), torch.ones(8, 1)
x, bias = torch.randn(3, 128, dtype=torch.bfloat16), torch.zeros(5120)
weight = ops.pack_weight(torch.ones(5120, 128).to(torch.float8_e4m3fn))
""",
        """
w, bias = torch.randn(64, 128, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
""",
    ],
}


def test_each_page_with_python_is_run() -> None:
    with_python = {page for page in TEXTS if code_blocks(page)}
    assert with_python == set(FOLLOWED) | set(BEFORE)
    assert all((ROOT / test).is_file() for test in FOLLOWED.values())


@pytest.mark.parametrize("page", BEFORE)
def test_python_blocks_run(page: str) -> None:
    names: dict[str, Any] = {"__name__": page}
    for before, block in zip(BEFORE[page], code_blocks(page), strict=True):
        if before is not None:
            exec(before, names)
            exec(compile(block.replace('"cuda"', '"cpu"'), page, "exec"), names)


def _command_lines() -> Iterator[str]:
    """Give what pages tell to type after `ostinato`: in blocks, and in sentences."""
    for text in TEXTS.values():
        for block in re.findall(r"^```(?!python).*?\n(.*?)^```$", text, re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                yield from re.findall(r"^(?:\.venv/bin/|python -m )?ostinato (\w.*)$", line.strip())
        sentences = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        for quoted in re.findall(r"`([^`]+)`", sentences):
            words = " ".join(quoted.split())
            yield from re.findall(r"^(?:python -m )?ostinato (\w[^|…]*)$", words)


COMMAND_LINES = sorted(set(_command_lines()))


@cache
def _help(command: tuple[str, ...]) -> str:
    """Return what `ostinato COMMAND --help` prints."""
    with redirect_stdout(io.StringIO()) as out, suppress(SystemExit):
        main([*command, "--help"])
    return out.getvalue()


def test_pages_name_most_commands() -> None:
    assert len(COMMAND_LINES) > 30
    assert {line.split()[0] for line in COMMAND_LINES} == set(COMMANDS)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_have_the_options_that_pages_name(line: str) -> None:
    words = shlex.split(line, comments=True)
    command = tuple(words[:2] if words[0] == "bench" and len(words) > 1 else words[:1])
    described = _help(command)
    assert f"usage: python -m ostinato {' '.join(command)}" in described
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", described), (command, option)


def _make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([\w-]+):", makefile, re.M))


def test_targets_of_make_exist() -> None:
    quoted = (
        found
        for text in TEXTS.values()
        for found in re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.M)
    )
    named = set(quoted)
    assert {"demo", "test", "docs", "dist"} <= named
    assert named <= _make_targets()


# Names of files that a reader is to make, or of many.
MADE_UP = re.compile(r"NAME|…|scale_rows|scaled_llama|toy_int8|\*")


def test_paths_of_sources_exist() -> None:
    folders = r"`((?:runtime|graphs|csrc|tests|docs|examples)/[^`\s{]*)`"
    paths = {path for text in TEXTS.values() for path in re.findall(folders, text)}
    assert len(paths) > 50
    missing = [path for path in paths if not MADE_UP.search(path) and not (ROOT / path).exists()]
    assert sorted(missing) == []


def test_links_out_of_the_site_lead_to_files() -> None:
    # Those of docs/ among one another are checked by mkdocs.
    for page, text in TEXTS.items():
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), (page, link)
