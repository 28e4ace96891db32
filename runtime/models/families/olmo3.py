"""OLMo 3: OLMo 2's layer, with windows in three of four layers and RoPE of two kinds."""

from __future__ import annotations

from ..config import FULL, SLIDING, ModelConfig, layer_types, read_rope
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
    kinds = _kinds(fields, num_layers)
    window = fields.integer("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig, ...]:
    """Read one embedding for each kind of layer, of both spellings.

    transformers 5 has an object for each; before, `rope_scaling` was that of full attention.
    """
    of_kind = {FULL: dict(fields.fields), SLIDING: {**fields.fields, "rope_scaling": None}}
    if fields.get("rope_parameters") is not None:
        nested = fields.child("rope_parameters")
        nested.only(*of_kind)
        for kind, read in of_kind.items():
            read["rope_parameters"] = nested.get(kind)
    made = {kind: read_rope(Fields(fields.where, read)) for kind, read in of_kind.items()}
    return tuple(made[kind] for kind in _kinds(fields, num_layers))


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
