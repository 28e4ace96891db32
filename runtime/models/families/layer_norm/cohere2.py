"""Cohere2 (Command R7B, Command A): Cohere's layer, with windows, and NoPE where there is none."""

from __future__ import annotations

from ...config import FULL, SLIDING, ModelConfig, layer_types, read_rope
from ...config_fields import Fields
from ...registry import Family, register
from ...required_kernels import kernels_with_norms
from ...rope import RopeConfig
from .cohere import DEFAULTS, ParallelLlama, cohere_config, layout


def _config(fields: Fields) -> ModelConfig:
    fields.choice("use_qk_norm", False, default=False)
    return cohere_config(fields, windows=_windows, ropes=_ropes)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    every = fields.integer("sliding_window_pattern", 4)
    kinds = layer_types(fields, num_layers) or tuple(
        SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)
    )
    window = fields.integer("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig | None, ...]:
    """Layers that attend to everything have no positions."""
    rope = read_rope(fields, interleaved=True)
    return tuple(None if window is None else rope for window in _windows(fields, num_layers))


register(
    Family(
        "cohere2",
        ("Cohere2ForCausalLM",),
        _config,
        layout,
        ParallelLlama.load,
        kernels=kernels_with_norms,
        defaults={**DEFAULTS, "sliding_window": 4096},
    )
)
