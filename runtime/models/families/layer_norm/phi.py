"""Phi-1, Phi-1.5 and Phi-2: Cohere's layer, with biases, GELU without a gate, and partial RoPE."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig, full_attention, same_rope, standard_config
from ...config_fields import Fields
from ...layout import DecoderLayout
from ...modules import Module
from ...norms import NormConfig
from ...parts import LinearPart
from ...registry import Family, register
from ...required_kernels import kernels_with_norms
from ..llama import layout_of, norm_part
from .cohere import ParallelLlama, ParallelParts, parallel_parts


def _layout(config: ModelConfig) -> DecoderLayout:
    usual = layout_of(config, _layer)
    vocabulary = (config.vocab_size, config.hidden_size)
    head = Module("lm_head", *vocabulary, has_bias=True, uneven=True)
    return replace(
        usual,
        norm=norm_part(config, "model.final_layernorm"),
        lm_head=LinearPart((head,), config.norm.input_kind, "rows"),
    )


def _layer(config: ModelConfig, index: int) -> ParallelParts:
    usual, prefix = parallel_parts(config, index), f"model.layers.{index}."
    *qkv, up = usual.qkv_mlp.modules
    (o,), (down,) = usual.o.modules, usual.down.modules
    return replace(
        usual,
        qkv_mlp=replace(usual.qkv_mlp, modules=(*qkv, replace(up, name=f"{prefix}mlp.fc1"))),
        o=replace(usual.o, modules=(replace(o, name=f"{prefix}self_attn.dense"),)),
        down=replace(usual.down, modules=(replace(down, name=f"{prefix}mlp.fc2"),)),
    )


def _config(fields: Fields) -> ModelConfig:
    fields.choice("qk_layernorm", False, default=False)
    fields.choice("tie_word_embeddings", False, default=False)  # the output projection has a bias
    config = standard_config(
        fields,
        windows=full_attention,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        ropes=same_rope(partial=True),
        norm=NormConfig(fields.number("layer_norm_eps", 1e-5), "layer_norm", has_bias=True),
        activations={"gelu_new": "gelu_tanh", "gelu": "gelu"},
    )
    return replace(config, parallel_block=True)


_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "partial_rotary_factor": 0.5}

register(
    Family(
        "phi",
        ("PhiForCausalLM",),
        _config,
        _layout,
        ParallelLlama.load,
        kernels=kernels_with_norms,
        defaults=_DEFAULTS,
    )
)
