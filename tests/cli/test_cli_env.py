"""`env`, and the machine it describes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

import ostinato
from ostinato.bench import machine
from ostinato.cli.main import main


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTINATO_COMMIT", raising=False)
    # What a git hook or an outer repository would add.
    monkeypatch.delenv("GIT_DIR", raising=False)


def test_env_names_what_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_JIT", "0")
    monkeypatch.setenv("AWS_SECRET", "never")
    monkeypatch.setenv("NVIDIA_API_KEY", "never")
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for part in (ostinato.__version__, "torch: ", "cores", "commit: ", "OSTINATO_JIT: 0"):
        assert part in printed
    assert "NVIDIA_API_KEY: (set)" in printed
    assert "never" not in printed


def test_env_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["ostinato"] == ostinato.__version__
    assert found["cuda"]["available"] == torch.cuda.is_available()
    assert found["cpu"]["model"]
    assert found["cpu"]["memory_mib"] > 100
    assert Path(found["location"], "__init__.py").samefile(ostinato.__file__)


def test_a_missing_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    found = machine.versions()
    assert found["no-such-package"] is None
    assert torch.__version__.startswith(found["torch"] or "missing")


def write_script(path: Path, content: str) -> None:
    path.write_text(f"#!/bin/sh\n{content}\n")
    path.chmod(0o755)


def test_gpus_are_those_that_the_driver_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []
    program = tmp_path / "nvidia-smi"
    write_script(program, "echo 'NVIDIA H200, 143771 MiB, 580.159.04'")
    assert machine.gpus() == [machine.Gpu("NVIDIA H200", "143771 MiB", "580.159.04")]
    write_script(program, "echo 'No devices were found'")
    assert machine.gpus() == []
    write_script(program, "echo 'NVIDIA H200, 143771 MiB, 580.159.04'\nexit 9")
    assert machine.gpus() == []


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.usefixtures("clean_environment")
def test_the_commit_of_our_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "runtime" / "__init__.py"
    module.parent.mkdir()
    module.write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "v1")
    # Installed in editable mode: a link elsewhere in the same checkout.
    link = tmp_path / "build" / "__init__.py"
    link.parent.mkdir()
    link.symlink_to(module)
    monkeypatch.setattr(ostinato, "__file__", str(link))
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert machine.location() == module.parent
    assert machine.commit() == commit
    module.write_text("changed = True\n")
    assert machine.commit() == f"{commit}-dirty"


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("in_a_repository", [True, False])
def test_an_installed_package_has_no_commit(
    in_a_repository: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_a_repository:
        git(tmp_path, "init", "--quiet")
    module = tmp_path / "site-packages" / "ostinato" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(ostinato, "__file__", str(module))
    assert machine.commit() is None
    monkeypatch.setenv("OSTINATO_COMMIT", "abc")
    assert machine.commit() == "abc"


def test_env_says_what_ops_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--arch", "80", "90a", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ops"]
    assert list(found) == ["sm_80", "sm_90a"]
    assert found["sm_80"]["sample"] == "kernel (sm_80)"
    assert found["sm_80"]["w8a8_linear, fp8"] == "torch (e4m3 dequantised to fp16)"
    assert set(found["sm_90a"].values()) == {"kernel (sm_90a)", "torch (mm)"}
    for op in ("attention, decode, 8-bit KV cache", "attention, prefill, 8-bit KV cache"):
        assert (found["sm_80"][op], found["sm_90a"][op]) == ("torch", "kernel (sm_90a)")
    assert main(["env", "--arch", "120"]) == 0
    assert "ops on sm_120:\n  embed: kernel (sm_120)\n" in capsys.readouterr().out
    assert main(["env", "--arch", "75"]) == 2
    assert "arch: got '75', expected one of 80, " in capsys.readouterr().err
