"""Adapters of other libraries: where they are looked for, and which peers come of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.bench.decode.benchmark import BENCHMARK
from ostinato.bench.decode.impls import paged
from ostinato.bench.harness.peers import (
    IN_CHECKOUT,
    VARIABLE,
    MissingAdapterError,
    adapter_folder,
    adapter_named,
    find_peers,
    select,
)
from ostinato.bench.shapes import STEP_PEERS
from ostinato.cli.main import main

ROOT = Path(__file__).parents[3]
NEW = """
from ostinato.bench.decode.inputs import Layout
from ostinato.bench.harness.benchmark import Implementation

def peers(section, environ):
    name = environ.get("NAME", "newcomer")
    return [Implementation(name, Layout(16), print)] if section == "decode" else []
"""


def test_a_flag_comes_before_the_variable_and_the_checkout(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert adapter_folder(None, {}) == ROOT / IN_CHECKOUT
    assert adapter_folder(None, {VARIABLE: str(other)}) == other
    assert adapter_folder(tmp_path, {VARIABLE: str(other)}) == tmp_path
    with pytest.raises(ValueError, match=r"--peers: got .*/none, expected a folder of adapters"):
        adapter_folder(tmp_path / "none", {})
    with pytest.raises(ValueError, match=f"{VARIABLE}: got none, expected a folder"):
        adapter_folder(None, {VARIABLE: "none"})


def test_a_peer_that_only_an_adapter_knows_comes_last(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(NEW)
    found = find_peers(BENCHMARK, tmp_path, {}, lambda peer: paged(peer, [16, 64]))
    assert list(found) == [*BENCHMARK.peers, "newcomer"]
    assert [impl.name for impl in select(["newcomer"], found)] == ["newcomer_p16", "newcomer_p64"]
    # Known ones, whose adapters this folder does not have.
    for name, file in BENCHMARK.peers.items():
        [impl] = found[name]
        with pytest.raises(MissingAdapterError, match=f"{tmp_path} has no {file}: adapters of"):
            impl.prepare()


def test_a_name_may_be_given_to_one_peer_only(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(NEW)
    (tmp_path / "newer.py").write_text(NEW)
    with pytest.raises(ValueError, match=r"newer\.py: got a second peer 'newcomer'"):
        find_peers(BENCHMARK, tmp_path, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package", "cannot be loaded: ModuleNotFoundError"),
        ("1 +", "cannot be loaded: SyntaxError"),
        ("peers = 3", r"got no function peers\(section, environ\), expected an adapter"),
    ],
)
def test_a_broken_adapter_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ValueError, match=rf"broken\.py: {message}"):
        find_peers(BENCHMARK, tmp_path, {})


TABLE = {
    file: (sections, names)
    for file, sections, names in re.findall(
        r"^\| `(\w+\.py)` \| .* \| ([\w, ]+) \| (.*) \|$",
        (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
}


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / IN_CHECKOUT).glob("*.py")))
def test_each_adapter_has_the_peers_of_the_page(file: str) -> None:
    adapter = adapter_named(file, ROOT / IN_CHECKOUT)
    sections, names = TABLE[file]
    found = set(STEP_PEERS) if file == "hugging_face.py" else set()  # its peers take no cases
    for section in ("gemm", "moe", "decode", "prefill", "step", "all_reduce"):
        of_section = {peer.name for peer in adapter.peers(section, {})}
        assert bool(of_section) == (section in sections and section != "step")
        found |= of_section
    assert found == set(re.findall(r"`(\w+)`", names))


def test_without_the_folder_peers_say_how_to_get_them(tmp_path: Path) -> None:
    found = find_peers(BENCHMARK, None, {}, lambda peer: paged(peer, [16]))
    assert list(found) == list(BENCHMARK.peers)
    with pytest.raises(
        MissingAdapterError,
        match=r"no folder with flashinfer\.py is known: adapters of peers are not installed with "
        rf"ostinato; copy {IN_CHECKOUT} of its source tree, and name the copy by --peers or ",
    ):
        found["fi"][0].prepare()
    with pytest.raises(MissingAdapterError, match=r"has no hugging_face\.py"):
        adapter_named("hugging_face.py", tmp_path)


def test_the_cli_says_which_adapters_it_misses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--heads",
        "4/2",
        "--batch",
        "1",
        "--kv",
        "9",
        "--head-dim",
        "16",
        "--page",
        "16",
        "--device",
        "cpu",
    ]
    assert main(["bench", "decode", *flags, "--peers", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name, file in BENCHMARK.peers.items():
        assert f"{name} is not timed: {tmp_path} has no {file}" in printed
    assert main(["bench", "decode", *flags, "--peers", str(tmp_path), "--peer", "fi"]) == 2
    assert f"error: fi: {tmp_path} has no flashinfer.py" in capsys.readouterr().err
    step = ["bench", "step", "--shape", "tiny", "--peer", "transformers"]
    assert main([*step, "--peers", str(tmp_path), "--device", "cpu"]) == 2
    assert f"error: {tmp_path} has no hugging_face.py" in capsys.readouterr().err
    assert main(["bench", "decode", *flags, "--peers", str(tmp_path / "no")]) == 2
    assert "--peers: got" in capsys.readouterr().err


def test_adapters_are_listed_without_their_libraries() -> None:
    script = f"""
import os, sys
from pathlib import Path
from ostinato.bench.harness.peers import load_adapter
for file in sorted(Path({str(ROOT / IN_CHECKOUT)!r}).glob("*.py")):
    for section in ("gemm", "moe", "decode", "prefill", "step"):
        load_adapter(file).peers(section, os.environ)
libraries = {{"flashinfer", "flash_attn_interface", "sgl_kernel", "transformers"}}
print(sorted(libraries & {{*sys.modules}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
