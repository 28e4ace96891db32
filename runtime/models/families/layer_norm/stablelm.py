"""StableLM: Llama's layer with layer norms, or Cohere's, and RoPE of a part of each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...config import ModelConfig, full_attention, same_rope, standard_config
from ...config_fields import Fields
from ...decoder import Decoder
from ...layout import DecoderLayout
from ...modules import TensorSpec
from ...norms import Norm, NormConfig
from ...parts import Loader, NormPart, SchemeOf, TensorPart
from ...registry import Family, register
from ...required_kernels import kernels_with_norms
from ..llama import LayerParts, Llama, layer_parts, layout_of
from .cohere import ParallelLlama, ParallelParts, norms_of_heads, parallel_parts


@dataclass(frozen=True)
class _NormsOfHeads(NormPart):
    """Norms of heads that are stored one by one: the name of `weight` is that of their list."""

    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield the weight of each head."""
        yield from self._stored()

    def build(self, loader: Loader) -> Norm:
        """Return the norm of the heads that are kept."""
        heads = self._stored() if self.kept_rows is None else self._stored()[self.kept_rows]
        weights = [TensorPart(head).build(loader) for head in heads]
        return Norm(torch.stack(weights), self.config.eps, self.config.kind)

    def _stored(self) -> list[TensorSpec]:
        heads, dim = self.weight.shape
        names = (f"{self.weight.name}.{head}.weight" for head in range(heads))
        return [TensorSpec((name,), ((dim,),)) for name in names]


def _layout(config: ModelConfig) -> DecoderLayout:
    return layout_of(config, _layer)


def _layer(config: ModelConfig, index: int) -> LayerParts | ParallelParts:
    parts = parallel_parts if config.parallel_block else layer_parts
    usual = parts(config, index)
    if not config.qk_norm:
        return usual
    prefix = f"model.layers.{index}.self_attn."
    names = (f"{prefix}q_layernorm.norms", f"{prefix}k_layernorm.norms")
    q, k = norms_of_heads(config, *names, _NormsOfHeads)
    return replace(usual, q_norm=q, k_norm=k)


def _load(
    config: ModelConfig,
    parts: DecoderLayout,
    loader: Loader,
    *,
    max_context: int | None = None,
    batch_invariant: bool = True,
) -> Decoder:
    decoder = ParallelLlama if config.parallel_block else Llama
    return decoder.load(
        config, parts, loader, max_context=max_context, batch_invariant=batch_invariant
    )


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    config = standard_config(
        fields,
        windows=full_attention,
        qkv_bias=fields.boolean("use_qkv_bias", False),
        o_bias=False,
        mlp_bias=False,
        qk_norm=fields.boolean("qk_layernorm", False),
        ropes=same_rope(partial=True),
        norm=NormConfig(fields.number("layer_norm_eps", 1e-5), "layer_norm", has_bias=True),
    )
    parallel = fields.boolean("use_parallel_residual", False)
    return replace(config, parallel_block=parallel)


_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 0, "partial_rotary_factor": 0.25}

register(
    Family(
        "stablelm",
        ("StableLmForCausalLM",),
        _config,
        _layout,
        _load,
        kernels=kernels_with_norms,
        defaults=_DEFAULTS,
    )
)
