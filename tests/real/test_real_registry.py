"""What is said where neither the cache nor the package registry has a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models import MODELS, RegistryUnreachableError

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def test_a_registry_out_of_reach_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(RegistryUnreachableError, match="the package registry cannot be reached"):
        MODELS[0].folder()
    assert list(tmp_path.iterdir()) == []
