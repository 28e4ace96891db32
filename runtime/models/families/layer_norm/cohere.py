"""Cohere (Command R): attention and MLP side by side after one layer norm, and scaled logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...config import ModelConfig, Ropes, Windows, full_attention, same_rope, standard_config
from ...config_fields import Fields
from ...kinds import InputKind
from ...layers import Layer, Linear
from ...layout import DecoderLayout
from ...modules import TensorSpec
from ...norms import Addend, Norm, NormConfig
from ...parts import LinearPart, NormPart
from ...registry import Family, register
from ...required_kernels import kernels_with_norms
from ..llama import Call, Llama, input_kinds, layer_parts, layout_of


@dataclass
class ParallelLayer:
    """Weights of one layer. `qkv_mlp` rows are [q; k; v; gate; up], or [q; k; v; up].

    `q_norm` and `k_norm`, where there are such, have weights for each head.
    """

    input_norm: Norm
    qkv_mlp: Linear
    o: Layer
    down: Layer
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: None = None
    all_q_norm: None = None
    all_k_norm: None = None


@dataclass(frozen=True)
class ParallelParts:
    """The parts of one layer, by the fields of `ParallelLayer`."""

    input_norm: NormPart
    q_norm: NormPart | None
    k_norm: NormPart | None
    qkv_mlp: LinearPart
    o: LinearPart
    down: LinearPart


class ParallelLlama(Llama):
    """Llama, whose attention and MLP read the same norm: one product makes the inputs of both."""

    layer_type = ParallelLayer

    @staticmethod
    def input_kinds(config: ModelConfig) -> dict[str, InputKind]:
        """Return what comes before each linear layer of a decoder layer, by its field."""
        usual = input_kinds(config)
        return {"qkv_mlp": usual["qkv"], "o": usual["o"], "down": usual["down"]}

    def _layer(
        self, index: int, x: Addend, residual: torch.Tensor | None, call: Call
    ) -> tuple[Addend, torch.Tensor]:
        layer, config, n_active = self.layers[index], self.config, call.n_active
        both, residual = layer.qkv_mlp.after_norm(x, residual, layer.input_norm, n_active)
        qkv_size = config.q_size + 2 * config.kv_size
        qkv, mlp = both.split([qkv_size, both.size(1) - qkv_size], dim=1)
        attended = layer.o(self._attend(index, qkv, call), n_active)
        # The kernel of norms gives the sum beside a norm that is not read.
        _, residual = layer.input_norm.of_sum(attended, residual)
        return layer.down.after_activation(mlp, config.activation, n_active), residual


def parallel_parts(config: ModelConfig, index: int) -> ParallelParts:
    """Return the parts of a layer of which attention and MLP read the same norm."""
    usual = layer_parts(config, index)
    modules = (*usual.qkv.modules, *usual.gate_up.modules)
    return ParallelParts(
        input_norm=usual.input_norm,
        q_norm=usual.q_norm,
        k_norm=usual.k_norm,
        qkv_mlp=replace(usual.qkv, modules=modules),
        # Rows of v, into which factors would be folded, are not the last of qkv_mlp.
        o=replace(usual.o, after=None),
        down=replace(usual.down, after="qkv_mlp"),
    )


def norms_of_heads(
    config: ModelConfig, q_name: str, k_name: str, part: type[NormPart] = NormPart
) -> tuple[NormPart, NormPart]:
    """Return norms with weights for each head of q, and of k.

    The names are those of the stored weights, or of what `part` makes of them.
    """

    def norm(name: str, heads: int, *, replicated: bool) -> NormPart:
        weight = TensorSpec((name,), ((heads, config.head_dim),))
        return part(weight, None, config.norm, of_heads=True, replicated=replicated)

    return (
        norm(q_name, config.num_heads, replicated=False),
        norm(k_name, config.num_kv_heads, replicated=True),
    )


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape."""
    return layout_of(config, _layer)


def _layer(config: ModelConfig, index: int) -> ParallelParts:
    usual = parallel_parts(config, index)
    if not config.qk_norm:
        return usual
    prefix = f"model.layers.{index}.self_attn."
    q, k = norms_of_heads(config, f"{prefix}q_norm.weight", f"{prefix}k_norm.weight")
    return replace(usual, q_norm=q, k_norm=k)


def cohere_config(
    fields: Fields,
    *,
    windows: Windows = full_attention,
    ropes: Ropes | None = None,
    qk_norm: bool = False,
) -> ModelConfig:
    """Read the fields of config.json; options as of `standard_config`."""
    for name in ("use_parallel_block", "use_gated_activation"):
        fields.choice(name, True, default=True)
    bias = fields.boolean("attention_bias", False)
    config = standard_config(
        fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        qk_norm=qk_norm,
        ropes=ropes or same_rope(interleaved=True),
        norm=NormConfig(fields.number("layer_norm_eps", 1e-5), "layer_norm"),
    )
    scale = fields.number("logit_scale", 0.0625)
    return replace(config, logits_scale=scale, parallel_block=True)


def _config(fields: Fields) -> ModelConfig:
    return cohere_config(fields, qk_norm=fields.boolean("use_qk_norm", False))


DEFAULTS = {"bos_token_id": 5, "eos_token_id": 255001, "tie_word_embeddings": True}

register(
    Family(
        "cohere",
        ("CohereForCausalLM",),
        _config,
        layout,
        ParallelLlama.load,
        kernels=kernels_with_norms,
        defaults={**DEFAULTS, "rope_theta": 500000.0},
    )
)
