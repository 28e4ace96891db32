"""The vLLM plug-in as far as it goes without vLLM; `make test-vllm` runs its other tests."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ostinato.compat import vllm as plugin
from ostinato.compat.vllm import version


def test_vllm_finds_the_entry_point() -> None:
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="ostinato")
    assert found.value == "ostinato.compat.vllm:register"
    assert found.load() is plugin.register


def test_importing_the_plugin_imports_no_vllm_and_no_cuda() -> None:
    code = (
        "import sys, torch, ostinato.compat.vllm; "
        "assert 'vllm' not in sys.modules; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_vllm_registering_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"vllm: not installed, expected vLLM 0\.33"):
        plugin.register()


@pytest.mark.parametrize(
    ("found", "tested"),
    [
        ("0.33.0", True),
        ("0.33.2+cu130", True),
        ("0.34.0", False),
        ("0.3.30", False),
        ("0.3", False),
    ],
)
def test_versions_are_compared_by_their_numbers(found: str, tested: bool) -> None:
    assert version.is_tested(found) is tested


def test_the_tests_install_the_version_that_is_named() -> None:
    makefile = Path(__file__).parents[2] / "Makefile"
    assert f"vllm=={version.TESTED}." in makefile.read_text(encoding="utf-8")
