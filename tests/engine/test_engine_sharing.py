"""Where prompts are cut: by the tiles of attention's kernels, by pages, or by chunks alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.engine import sharing
from ostinato.engine.scheduler import checked_chunk
from ostinato.engine.sharing import cut_unit, sharing_unit
from ostinato.models import KVFormat
from ostinato.ops.attention.dequantize_kv import prompt_kernels

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def model_of(dim: int, *, device: str = "cuda", batch_invariant: bool = True) -> Any:
    return SimpleNamespace(
        device=torch.device(device),
        batch_invariant=batch_invariant,
        kernels=lambda cache: prompt_kernels(BF16, dim, cache.dtype, batch_invariant=True),
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "runs", lambda family, device: True)
    monkeypatch.setattr(sharing, "device_index", lambda device: 0)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("dim", "page", "unit", "unit_of_8_bits"),
    [(128, 16, 128, 128), (64, 16, 384, 192), (128, 48, 384, 384)],
)
def test_kernels_cut_at_multiples_of_their_tiles(
    dim: int, page: int, unit: int, unit_of_8_bits: int
) -> None:
    assert cut_unit(model_of(dim), KVFormat(BF16), page) == unit
    assert cut_unit(model_of(dim), KVFormat(E4M3, "token"), page) == unit_of_8_bits


@pytest.mark.usefixtures("hopper")
def test_others_cut_at_pages_or_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = KVFormat(BF16)
    assert cut_unit(model_of(128, device="cpu"), plain, 16) == 16
    assert cut_unit(model_of(128, batch_invariant=False), plain, 16) is None
    assert cut_unit(model_of(120), plain, 16) is None
    monkeypatch.setattr(sharing, "runs", lambda family, device: False)
    assert cut_unit(model_of(128), plain, 16) is None


@pytest.mark.parametrize(
    ("page", "unit", "chunk"),
    [
        *((16, 128, 512), (16, 192, 576), (16, None, 512), (48, 384, 768)),
        *((16, 16, 512), (48, 48, 528), (100, 3200, 600)),
    ],
)
def test_the_default_chunk_is_a_multiple_of_what_prompts_are_cut_at(
    page: int, unit: int | None, chunk: int
) -> None:
    """Unless that is more than a chunk should have."""
    assert checked_chunk(None, page, unit) == chunk


def test_what_is_shared_is_at_most_a_chunk() -> None:
    assert sharing_unit(192, 576) == 192
    assert sharing_unit(192, 512) == 512
    assert sharing_unit(None, 512) == 512
    assert sharing_unit(3200, 600) == 600
