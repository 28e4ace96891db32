"""Granite 3: Llama's layer, with factors of embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from ..config import LLAMA_IDS, ModelConfig, full_attention, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = standard_config(fields, windows=full_attention, qkv_bias=bias, o_bias=bias)
    return with_multipliers(config, fields)


def with_multipliers(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Return the configuration with the factors that the file names.

    What a layer adds to the residual stream is multiplied by `residual_multiplier` = m. Here the
    whole stream is 1/m times as large instead, so that layers add what they compute: the embedding
    is divided by m, and since RMS norms undo it, only their eps, beside the mean of squares, is
    divided by m².

    Raises:
        UnsupportedModelError: naming the field, for a factor that is not above 0.
    """
    residual = fields.number("residual_multiplier", 1.0)
    return replace(
        config,
        norm=replace(config.norm, eps=config.norm.eps / residual**2),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0) / residual,
        logits_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


register(
    Family("granite", ("GraniteForCausalLM",), _config, layout, Llama.load, defaults=LLAMA_IDS)
)
