"""EXAONE 4: norms after attention and MLP, of each head of q and k, and NoPE beside windows."""

from __future__ import annotations

from ..config import FULL, SLIDING, ModelConfig, layer_types, read_rope, standard_config
from ..config_fields import Fields
from ..layout import DecoderLayout
from ..registry import Family, register
from ..required_kernels import kernels_with_norms
from ..rope import RopeConfig
from .llama import layout_of
from .olmo2 import PostNormLlama, post_norm_parts


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape."""
    return layout_of(config, post_norm_parts)


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    return standard_config(
        fields,
        windows=_windows,
        qkv_bias=False,
        o_bias=False,
        qk_norm=True,
        mlp_bias=False,
        ropes=_ropes,
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.optional_integer("sliding_window")
    kinds = layer_types(fields, num_layers)
    if window is None:
        if SLIDING in kinds:
            raise fields.wrong("sliding_window", f"an integer, as layer_types has {SLIDING!r}")
        return (None,) * num_layers
    if not kinds:
        every = fields.integer("sliding_window_pattern")
        kinds = tuple(SLIDING if (layer + 1) % every else FULL for layer in range(num_layers))
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig | None, ...]:
    """Where some layers have a window, the others have no positions."""
    rope = read_rope(fields)
    if fields.get("sliding_window") is None:
        return (rope,) * num_layers
    return tuple(None if window is None else rope for window in _windows(fields, num_layers))


_DEFAULTS = {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}

register(
    Family(
        "exaone4",
        ("Exaone4ForCausalLM",),
        _config,
        layout,
        PostNormLlama.load,
        kernels=kernels_with_norms,
        defaults=_DEFAULTS,
    )
)
