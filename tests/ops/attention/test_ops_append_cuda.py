"""From tensors to the arguments of the kernel behind `append_kv`, on a machine without GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_cases import E4M3, int32

from ostinato.ops.attention import append_kv_cuda
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.common.pdl import pdl

STREAM = 77
CPU = torch.device("cpu")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Give what would have been launched: the kernel's arguments and its `variant`."""
    seen: list[dict[str, Any]] = []

    class Library:
        def __init__(self, variant: AppendKV) -> None:
            self._variant = variant

        def launch(self, **arguments: Any) -> None:
            seen.append({"variant": self._variant, **arguments})

    def load(variant: AppendKV, *, device: int, stream: int) -> Library:
        assert stream == STREAM
        return Library(variant)

    monkeypatch.setattr(append_kv_cuda, "load", load)
    monkeypatch.setattr(append_kv_cuda, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(append_kv_cuda, "on_device", lambda device: torch.no_grad())
    return seen


def call(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "k": torch.zeros(3, 2, 16),
        "v": torch.zeros(3, 2, 16),
        "k_cache": torch.zeros(4, 5, 2, 16),
        "v_cache": torch.zeros(4, 5, 2, 16),
        "slot_mapping": torch.arange(3),
        "positions": None,
        "cos_sin": None,
        "q": None,
        "q_out": None,
        "interleaved": False,
        "q_norm_weight": None,
        "k_norm_weight": None,
        "norm_eps": 0.5,
        "norm_after_rotation": False,
        "k_scale": None,
        "v_scale": None,
        "k_scale_out": None,
        "v_scale_out": None,
        **changes,
    }
    append_kv_cuda.append_heads(**arguments)
    return arguments


def test_every_tensor_reaches_the_kernel_as_it_lies(launches: list[dict[str, Any]]) -> None:
    fused = torch.zeros(3, 10, 20, dtype=torch.bfloat16)[..., :16]
    q, k, v = fused.split([6, 2, 2], dim=1)
    cache = torch.zeros(4, 2, 5, 16, dtype=torch.int8).transpose(1, 2)
    scale = torch.zeros(4, 5, 2)
    given = call(
        q=q,
        q_out=torch.empty(3, 6, 16, dtype=torch.bfloat16),
        k=k,
        v=v,
        k_cache=cache,
        v_cache=torch.zeros(4, 5, 2, 16, dtype=torch.int8),
        positions=int32([0, 1, 2], CPU),
        cos_sin=torch.zeros(9, 12)[:, :8],
        interleaved=True,
        q_norm_weight=torch.ones(16),
        k_norm_weight=torch.ones(16, dtype=torch.bfloat16),
        norm_after_rotation=True,
        k_scale=scale,
        v_scale=torch.ones(2),
        v_scale_out=scale + 1,
    )
    (launch,) = launches
    assert launch == {
        "variant": AppendKV(dtype="bf16", cache_dtype="int8"),
        "q": (q.data_ptr(), 200, 20),
        "q_out": (given["q_out"].data_ptr(), 96, 16),
        "k": (k.data_ptr(), 200, 20),
        "v": (v.data_ptr(), 200, 20),
        "k_cache": (cache.data_ptr(), 160, 16, 80),
        "v_cache": (given["v_cache"].data_ptr(), 160, 32, 16),
        "k_scale": (scale.data_ptr(), 10, 2, 1),
        "k_scale_per_token": True,
        "v_scale": (given["v_scale"].data_ptr(), 0, 0, 1),
        "v_scale_per_token": False,
        "k_scale_out": (0, 0, 0, 0),
        "v_scale_out": (given["v_scale_out"].data_ptr(), 10, 2, 1),
        "slot_mapping": given["slot_mapping"].data_ptr(),
        "positions": given["positions"].data_ptr(),
        "cos_sin": given["cos_sin"].data_ptr(),
        "cos_sin_stride": 12,
        "rotary_dim": 8,
        "interleaved": True,
        "q_norm_weight": given["q_norm_weight"].data_ptr(),
        "q_norm_is_fp32": True,
        "k_norm_weight": given["k_norm_weight"].data_ptr(),
        "k_norm_is_fp32": False,
        "norm_eps": 0.5,
        "norm_after_rotation": True,
        "tokens": 3,
        "heads_q": 6,
        "heads_kv": 2,
        "dim": 16,
        "page_size": 5,
        "pdl": True,
        "stream": STREAM,
    }


def test_what_is_not_given_is_null(launches: list[dict[str, Any]]) -> None:
    with pdl(False):
        call()
    (launch,) = launches
    assert launch["variant"] == AppendKV(dtype="fp32")
    assert launch["q"] == launch["q_out"] == (0, 0, 0)
    assert launch["k_scale"] == launch["v_scale"] == (0, 0, 0, 0)
    for name in ("heads_q", "positions", "cos_sin", "rotary_dim", "q_norm_weight", "pdl"):
        assert launch[name] == 0


@pytest.mark.parametrize(("shape", "stride"), [((), 0), ((1,), 0), ((2,), 1)])
def test_a_fixed_scale_is_of_all_heads_or_of_each(
    shape: tuple[int, ...], stride: int, launches: list[dict[str, Any]]
) -> None:
    cache = torch.zeros(4, 5, 2, 16).to(E4M3)
    scale = torch.ones(shape)
    call(k_cache=cache, v_cache=cache.clone(), k_scale=scale, v_scale=scale)
    (launch,) = launches
    assert launch["variant"] == AppendKV(dtype="fp32", cache_dtype="e4m3")
    assert launch["k_scale"] == launch["v_scale"] == (scale.data_ptr(), 0, 0, stride)
    assert not launch["k_scale_per_token"]
