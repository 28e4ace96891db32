"""OLMo 2: norms after attention and MLP instead of before, and of all heads of q, and of k."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..config import ModelConfig, Ropes, Windows, full_attention, same_rope, standard_config
from ..config_fields import Fields
from ..kinds import InputKind
from ..layers import Layer, Linear
from ..layout import DecoderLayout
from ..modules import share
from ..norms import Addend, Norm, summed
from ..parts import LinearPart, Loader, NormPart
from ..ranks import NormOverRanks
from ..registry import Family, register
from ..required_kernels import kernels_with_norms
from .llama import Call, Llama, input_kinds, layer_parts, layout_of, norm_part


@dataclass
class PostNormLayer:
    """Weights of one layer. `qkv` rows are [q; k; v], `gate_up` rows [gate; up].

    `q_norm` and `k_norm` are of each head; `all_q_norm` [q_size] and `all_k_norm` [kv_size] of all.
    """

    qkv: Linear
    o: Layer
    attention_output_norm: Norm
    gate_up: Linear
    down: Layer
    mlp_output_norm: Norm
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    all_q_norm: Norm | None = None
    all_k_norm: Norm | None = None
    sinks: None = None


@dataclass(frozen=True)
class PostNormParts:
    """The parts of one layer, by the fields of `PostNormLayer`."""

    qkv: LinearPart
    q_norm: NormPart | None
    k_norm: NormPart | None
    all_q_norm: NormPart | None
    all_k_norm: NormPart | None
    o: LinearPart
    attention_output_norm: NormPart
    gate_up: LinearPart
    down: LinearPart
    mlp_output_norm: NormPart


@dataclass(frozen=True, kw_only=True)
class NormOverHeads(NormPart):
    """The weight of a norm over all heads, which every rank keeps whole.

    Args:
        heads: which ranks divide.
        kept: what a rank has of the weight's elements; None is all.
    """

    heads: int
    kept: slice | None = None

    def shard(self, rank: int, size: int) -> NormOverHeads:
        """Return the norm of a rank that has some of the heads, or one of them with others."""
        name, (elements,) = self.weight.name, self.weight.shape
        kept = share(name, elements, self.heads, rank, size, replicated=self.replicated)
        return replace(self, kept=kept)

    def build(self, loader: Loader) -> Norm:
        """Return the norm."""
        norm = super().build(loader)
        if self.kept is None or loader.communicator is None:
            return norm
        return NormOverRanks(**vars(norm), kept=self.kept, communicator=loader.communicator)


class PostNormLlama(Llama):
    """Llama, whose layers normalise what they return instead of what they read."""

    layer_type = PostNormLayer

    @staticmethod
    def input_kinds(config: ModelConfig) -> dict[str, InputKind]:
        """Return what comes before each linear layer of a decoder layer, by its field."""
        return {**input_kinds(config), "qkv": "per_token", "gate_up": "per_token"}

    def _layer(
        self, index: int, x: Addend, residual: torch.Tensor | None, call: Call
    ) -> tuple[Addend, torch.Tensor]:
        layer, n_active = self.layers[index], call.n_active
        stream = summed(x) if residual is None else self._sum(x, residual)
        attended = self._attend(index, layer.qkv(stream, n_active), call)
        attended = layer.attention_output_norm(layer.o(attended, n_active))
        stream = self._sum(attended, stream)
        gate_up = layer.gate_up(stream, n_active)
        returned = layer.down.after_activation(gate_up, self.config.activation, n_active)
        return layer.mlp_output_norm(returned), stream

    def _sum(self, x: Addend, residual: torch.Tensor) -> torch.Tensor:
        """Return x + residual, which the kernel of norms gives beside a norm that is not read."""
        return self.norm.of_sum(x, residual)[1]


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape."""
    return layout_of(config, _layer)


def _layer(config: ModelConfig, index: int) -> PostNormParts:
    q, k = norms_over_all_heads(config, index)
    return replace(post_norm_parts(config, index), all_q_norm=q, all_k_norm=k)


def norms_over_all_heads(config: ModelConfig, index: int) -> tuple[NormPart, NormPart]:
    """Return the norms over all heads of q, and of k, of the layer of an index."""
    prefix = f"model.layers.{index}.self_attn."

    def norm(name: str, heads: int, *, replicated: bool) -> NormPart:
        usual = norm_part(config, f"{prefix}{name}_norm", (heads * config.head_dim,))
        return NormOverHeads(usual.weight, None, config.norm, replicated=replicated, heads=heads)

    return (
        norm("q", config.num_heads, replicated=False),
        norm("k", config.num_kv_heads, replicated=True),
    )


def post_norm_parts(config: ModelConfig, index: int) -> PostNormParts:
    """Return the parts of a layer, without norms over all heads."""
    usual, prefix = layer_parts(config, index), f"model.layers.{index}."
    return PostNormParts(
        qkv=replace(usual.qkv, kind="per_token", after=None),
        q_norm=usual.q_norm,
        k_norm=usual.k_norm,
        all_q_norm=None,
        all_k_norm=None,
        o=usual.o,
        attention_output_norm=norm_part(config, f"{prefix}post_attention_layernorm"),
        gate_up=replace(usual.gate_up, kind="per_token", after=None),
        down=usual.down,
        mlp_output_norm=norm_part(config, f"{prefix}post_feedforward_layernorm"),
    )


def olmo_config(
    fields: Fields, *, windows: Windows = full_attention, ropes: Ropes | None = None
) -> ModelConfig:
    """Read the fields of config.json, windows and rotary embeddings as of `standard_config`."""
    bias = fields.boolean("attention_bias", False)
    return standard_config(
        fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        ropes=ropes or same_rope(),
    )


register(
    Family(
        "olmo2",
        ("Olmo2ForCausalLM",),
        olmo_config,
        layout,
        PostNormLlama.load,
        kernels=kernels_with_norms,
        defaults={"eos_token_id": 50279, "rms_norm_eps": 1e-5},
    )
)
