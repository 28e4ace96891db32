"""OLMo 3: OLMo 2's layer, with windows in three of four layers and RoPE of two kinds."""

from __future__ import annotations

from ..config import FULL, SLIDING, ModelConfig, layer_types, ropes_of_kinds, windows_of_kinds
from ..config_fields import Fields
from ..registry import Family, register
from ..required_kernels import kernels_with_norms
from ..rope import RopeConfig
from .olmo2 import PostNormLlama, layout, olmo_config


def _config(fields: Fields) -> ModelConfig:
    return olmo_config(fields, windows=_windows, ropes=_ropes)


def _kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    return layer_types(fields, num_layers) or tuple(
        SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers)
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return windows_of_kinds(fields, _kinds(fields, num_layers))


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig, ...]:
    return ropes_of_kinds(fields, _kinds(fields, num_layers))


_DEFAULTS = {
    "eos_token_id": 50279,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "sliding_window": 4096,
}

register(
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        _config,
        layout,
        PostNormLlama.load,
        kernels=kernels_with_norms,
        defaults=_DEFAULTS,
    )
)
