"""The pages of docs/integrations/ run as written."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from page_blocks import code_blocks

from ostinato.compat.transformers import NAME
from ostinato.compat.vllm import version

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/integrations"


def text_of(page: str) -> str:
    return (PAGES / page).read_text(encoding="utf-8")


def run(page: str, device: str = "cpu") -> dict[str, Any]:
    """Run the blocks of a page one after another, on a device, and return what they defined."""
    # torch.compile imports the module of a function that it traces.
    module = ModuleType("page_" + page.removesuffix(".md").replace("-", "_"))
    sys.modules[module.__name__] = module
    names = vars(module)
    for block in code_blocks(f"docs/integrations/{page}"):
        there = block.replace("torch.cuda.is_available()", str(device == "cuda"))
        exec(compile(there, page, "exec"), names)
    return names


def test_the_page_on_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = text_of("transformers.md")
    monkeypatch.chdir(ROOT)
    names = run("transformers.md")
    assert names["out"].shape[1] == names["ids"].shape[1] + 40
    assert all(len(result.generated_tokens) == 20 for result in names["results"].values())
    assert names["model"].config._attn_implementation == NAME
    # The report that the page shows, but for the names that it leaves out.
    printed = capsys.readouterr().out
    shown = page.partition("```text\n")[2].partition("```")[0].splitlines()
    assert len(shown) == 6
    for line in shown:
        head, _, tail = line.partition("…")
        assert any(
            got.startswith(head.rstrip()) and got.endswith(tail) for got in printed.splitlines()
        ), line


def test_the_page_on_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor compiles C++ for half a minute; what it is given is the same.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    names = run("torch-compile.md")
    expected = names["layer"](names["x"], names["residual"])
    for got, want in zip((names["y"], names["total"]), expected, strict=True):
        assert torch.equal(got, want)
    assert names["y"].shape == (4, 128)


def test_the_page_on_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    names = run("flash-attn.md")
    assert sys.modules["flash_attn"] is names["module"]
    assert names["out"].shape == (2, 1, 4, 64)
    assert not names["out"].isnan().any()


@pytest.mark.gpu
@pytest.mark.timeout(600)  # torch compiles a step of generate
def test_the_page_on_transformers_runs_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names = run("transformers.md", "cuda")
    assert names["out"].is_cuda
    assert names["out"].shape[1] == names["ids"].shape[1] + 40
    assert all(len(result.generated_tokens) == 20 for result in names["results"].values())
    assert "8-bit linear modules: 28" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_page_on_torch_compile_runs_on_a_gpu() -> None:
    names = run("torch-compile.md", "cuda")
    expected = names["layer"](names["x"], names["residual"])
    for got, want in zip((names["y"], names["total"]), expected, strict=True):
        assert got.is_cuda
        torch.testing.assert_close(got, want)


def test_the_page_on_vllm_has_commands_only() -> None:
    page = text_of("vllm.md")
    assert code_blocks("docs/integrations/vllm.md") == []
    assert f"pip install vllm=={version.TESTED}.0{os.linesep}" in page
    assert (ROOT / "examples/tiny-llama/config.json").exists()
    assert f"vllm serve examples/tiny-llama{os.linesep}" in page


def test_the_page_on_sglang_has_commands_only() -> None:
    page = text_of("sglang.md")
    assert code_blocks("docs/integrations/sglang.md") == []
    wanted = (ROOT / "tests/compat/sglang_requirements.txt").read_text(encoding="utf-8")
    (pinned,) = (line for line in wanted.splitlines() if line.startswith("sglang=="))
    assert f"pip install {pinned}{os.linesep}" in page
