"""What vLLM's dummy weights are overwritten with where a GPU run compares with it."""

from __future__ import annotations

import torch
from torch import nn
from vllm_weights import fill_model


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def _model() -> nn.Module:
    """Return parameters named as those of a layer of vLLM's."""
    model = nn.Module()
    model.qkv_proj, model.input_layernorm, model.attn = nn.Module(), nn.Module(), nn.Module()
    model.qkv_proj.weight = _parameter((96, 64), torch.int8)
    model.qkv_proj.weight_scale = _parameter((96, 1), torch.float32)
    model.qkv_proj.bias = _parameter((96,), torch.bfloat16)
    model.input_layernorm.weight = _parameter((64,), torch.bfloat16)
    model.attn.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
    model.embed_tokens = _parameter((200, 64), torch.bfloat16)
    return model


def test_every_weight_is_filled_and_alike_each_time() -> None:
    model, again = _model(), _model()
    filled = dict(fill_model(model))
    fill_model(again)
    assert filled.keys() == dict(model.named_parameters()).keys()
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, filled[name]), name
    dequantized = filled["qkv_proj.weight"] * filled["qkv_proj.weight_scale"]
    for weight in (dequantized, filled["qkv_proj.bias"], filled["embed_tokens"]):
        assert 0.01 < weight.float().std() < 0.03
    assert filled["input_layernorm.weight"].eq(1).all()
    assert filled["attn.k_scale"] == -1
