"""Code blocks of README and docs/getting-started.md run as written; README's figures are right."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import draw_bench
import draw_kernels
import pytest

import draw

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "docs/getting-started.md")
# No GPU, and the programs of this Python environment first.
ENVIRONMENT = {
    **os.environ,
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
}
# What pip would do takes minutes and the network.
DRY_PIP = "pip install --quiet --dry-run --no-deps --no-build-isolation "


def _blocks(page: str) -> list[tuple[str, str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert text.count("\n```") == 2 * len(blocks), f"{page}: fences that do not pair"
    return blocks


BLOCKS = [(page, *block) for page in PAGES for block in _blocks(page)]


def _texts(language: str) -> list[str]:
    """Return the different blocks of a language."""
    return list(dict.fromkeys(text for _, found, text in BLOCKS if found == language))


def _lines(language: str) -> list[str]:
    lines = (line for text in _texts(language) for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line.strip()))


def _run(*command: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )


def test_every_block_names_a_language_that_is_tested() -> None:
    # `console` needs a network or a GPU: its options are looked up.
    assert {language for _, language, _ in BLOCKS} == {"python", "sh", "console", "text"}


@pytest.mark.parametrize("snippet", _texts("python"))
def test_python_runs(snippet: str) -> None:
    done = _run(sys.executable, "-c", snippet)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("line", _lines("sh"))
def test_shell_lines_run(line: str) -> None:
    done = _run("bash", "-euc", line.replace("pip install ", DRY_PIP))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in _lines("console") if line[:8] == "ostinato"])
def test_console_lines_have_options_that_exist(line: str) -> None:
    _, command, *rest = shlex.split(line)
    described = _run("ostinato", command, "--help").stdout
    assert command in described
    for option in (word for word in rest if word.startswith("--")):
        assert re.search(rf"{option}\b", described), (command, option)


def test_commands_in_sentences_exist() -> None:
    commands = re.findall(r"`(ostinato|make) (\w+)`", TEXT)
    assert {("ostinato", "generate"), ("make", "demo")} <= set(commands)
    for program, command in dict.fromkeys(commands):
        arguments = [command, "--help"] if program == "ostinato" else ["--dry-run", command]
        done = _run(program, *arguments)
        assert done.returncode == 0, (command, done.stderr)


def test_relative_links_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT) if "://" not in link]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_readme_has_at_most_150_lines() -> None:
    assert len(TEXT.splitlines()) <= 150


def _figures(page: str, dtype: str) -> dict[str, list[float]]:
    """Return the cells of a table's rows of a format by what they are of."""
    rows = re.findall(rf"^\| {dtype}, (.*?) \|(.*) \|$", page, flags=re.MULTILINE)
    return {name: [float(cell) for cell in line.split("|")] for name, line in rows}


@pytest.mark.parametrize("dtype", draw.FORMATS)
@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_tables_hold_the_figures_of_their_file(page: str, dtype: str) -> None:
    expected: dict[str, list[float]] = {"vLLM 0.33.0": [], "Ostinato": [], "ratio": []}
    for row in json.loads(draw.ENGINE.read_text(encoding="utf-8"))["rows"]:
        if (row["section"], row["dtype"]) == ("step", dtype):
            name = "Ostinato" if row["impl"].startswith("ostinato") else "vLLM 0.33.0"
            expected[name].append(round(row["us"]))
            expected["ratio"] += [row["ratio"]] if "ratio" in row else []
    figures = _figures((ROOT / page).read_text(encoding="utf-8"), draw.FORMATS[dtype])
    shown = ["ratio"] if page == "README.md" and dtype.startswith("fp8") else list(expected)
    assert figures == {name: expected[name] for name in shown}


@pytest.mark.parametrize("name", draw_kernels.PICTURES)
def test_pictures_of_kernels_show_the_figures_of_their_files(name: str, tmp_path: Path) -> None:
    draw_kernels.PICTURES[name](tmp_path / name)
    drawn = (tmp_path / name).read_text(encoding="utf-8")
    assert drawn == (draw.HERE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", draw_bench.PICTURES)
def test_pictures_of_benchmarks_show_the_rows_of_their_files(name: str, tmp_path: Path) -> None:
    draw_bench.draw_bench(tmp_path / name)
    drawn = (tmp_path / name).read_text(encoding="utf-8")
    assert drawn == (draw.HERE / name).read_text(encoding="utf-8")


def test_the_picture_shows_the_figures_of_its_file(tmp_path: Path) -> None:
    draw.draw_engine(tmp_path / "engine_h200.svg")
    drawn = (tmp_path / "engine_h200.svg").read_text(encoding="utf-8")
    assert drawn == (draw.HERE / "engine_h200.svg").read_text(encoding="utf-8")
