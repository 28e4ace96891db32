"""CWM (Code World Model): Llama's layer, with sliding windows in three of four layers."""

from __future__ import annotations

from ..config import FULL, SLIDING, ModelConfig, layer_types, standard_config, windows_of_kinds
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout

_PERIOD = 4  # of layers, the first of which attends to everything


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.require("head_dim")  # whose default is not hidden_size / num_attention_heads
    if fields.get("rope_scaling") is None:
        fields.child("rope_parameters")  # whose default is that of Llama 3
    return standard_config(fields, windows=_windows, qkv_bias=False, o_bias=False)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    pattern = (FULL, *(SLIDING,) * (_PERIOD - 1))
    kinds = layer_types(fields, num_layers) or tuple(
        pattern[layer % _PERIOD] for layer in range(num_layers)
    )
    return windows_of_kinds(fields, kinds)


_DEFAULTS = {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": 8192,
}

register(Family("cwm", ("CwmForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS))
