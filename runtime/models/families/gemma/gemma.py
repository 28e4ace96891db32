"""Gemma: Llama's layer, with GELU, norms whose weights are stored less 1, and scaled embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...config import ModelConfig, Windows, full_attention, standard_config
from ...config_fields import Fields
from ...norms import NormConfig
from ...registry import Family, register
from ..llama import Llama, layout

_TANH = "gelu_pytorch_tanh"
DEFAULTS: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True}


class Gemma(Llama):
    """Llama whose factor of embeddings is rounded to their dtype, as in transformers."""

    @staticmethod
    def embedding_factor(config: ModelConfig) -> float:
        """Return what embeddings are multiplied by when they are loaded."""
        return float(torch.tensor(config.embedding_scale, dtype=config.dtype, device="cpu"))


def gemma_config(
    fields: Fields, *, windows: Windows, activation_field: str = "hidden_activation", **more: Any
) -> ModelConfig:
    """Read what the families of Gemma have in common.

    Args:
        fields: as of `standard_config`.
        windows: likewise.
        activation_field: which names the MLP's function.
        more: further arguments of `standard_config`.

    Raises:
        UnsupportedModelError: naming the field.
    """
    fields.require("num_key_value_heads")
    fields.require("head_dim")  # whose default is not hidden_size / num_attention_heads
    fields.choice("use_bidirectional_attention", False, default=False)
    bias = fields.boolean("attention_bias", False)
    # The first files of Gemma say "gelu", and mean this.
    names = (_TANH, "gelu") if activation_field == "hidden_act" else (_TANH,)
    config = standard_config(
        fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        norm=NormConfig(fields.number("rms_norm_eps", 1e-6), plus_one=True),
        activations=dict.fromkeys(names, "gelu_tanh_mul"),
        activation_field=activation_field,
        **more,
    )
    return replace(config, embedding_scale=config.hidden_size**0.5)


def _config(fields: Fields) -> ModelConfig:
    fields.choice("hidden_activation", None, _TANH)  # which counted in transformers 4
    return gemma_config(fields, windows=full_attention, activation_field="hidden_act")


register(Family("gemma", ("GemmaForCausalLM",), _config, layout, Gemma.load, defaults=DEFAULTS))
