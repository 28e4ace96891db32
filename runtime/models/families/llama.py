"""Llama 2 and 3: the decoder layer that Mistral, Qwen2 and Qwen3 share with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch

from ... import ops
from ...jit.variant import Variant
from ...ops.collective.communicator import Communicator
from ...ops.collective.partial_sum import PartialSum
from ...ops.linear.precompile import gated_kernels
from ...ops.linear.quantize_cuda import GATED
from ..attention import Attention, HeadNorms
from ..cache import PagedKVCache
from ..config import LLAMA_IDS, ModelConfig, full_attention, standard_config
from ..config_fields import Fields
from ..decoder import AttentionInputs, Decoder, ExpertsUse, LinearUse, SeenRows
from ..folding import build
from ..kinds import InputKind
from ..kv_format import KVFormat, KVScales, kv_format
from ..layers import Layer, Linear, Sampling, mlp_after_norm, tensors_of
from ..layout import DecoderLayout
from ..modules import Module, TensorSpec, uneven_width
from ..norms import Addend, Norm, summed
from ..parts import LinearPart, Loader, NormPart, TensorPart
from ..ranks import GatheredHead, normalized_heads
from ..registry import Family, family_of, register
from ..required_kernels import collective_kernels

# What takes up factors of the input of each linear layer; see `LinearPart.after`.
_FOLDED_INTO = {
    "qkv": "input_norm",
    "o": "qkv",
    "gate_up": "post_attention_norm",
    "down": "gate_up",
}


@dataclass
class DecoderLayer:
    """Weights of one layer. `qkv` rows are [q; k; v], `gate_up` rows [gate; up], or [up] alone.

    What some families have, None in the others: norms of each head of q and k, or of all heads of q
    [q_size] and of k [kv_size], attention sinks [num_heads] (in fp32, as attention reads them),
    norms of what attention and MLP return.
    """

    input_norm: Norm
    qkv: Linear
    o: Layer
    post_attention_norm: Norm
    gate_up: Linear
    down: Layer
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: torch.Tensor | None = None
    attention_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    all_q_norm: Norm | None = None
    all_k_norm: Norm | None = None

    def __post_init__(self) -> None:
        if self.sinks is not None:
            self.sinks = self.sinks.float()


@dataclass(frozen=True)
class Call:
    """What all layers of one call read; see `Decoder`."""

    positions: torch.Tensor
    attention: AttentionInputs
    cache: PagedKVCache
    n_active: torch.Tensor | None


@dataclass(frozen=True)
class LayerParts:
    """The parts of one layer, by the fields of `DecoderLayer`."""

    input_norm: NormPart
    q_norm: NormPart | None
    k_norm: NormPart | None
    post_attention_norm: NormPart
    qkv: LinearPart
    o: LinearPart
    gate_up: LinearPart
    down: LinearPart
    sinks: TensorPart | None = None
    attention_output_norm: NormPart | None = None
    mlp_output_norm: NormPart | None = None
    all_q_norm: NormPart | None = None
    all_k_norm: NormPart | None = None


class Llama(Decoder):
    """A decoder over a paged KV cache. It holds weights and no state between calls.

    A family whose layers have other parts has a subclass with a `layer_type`, `input_kinds` and a
    `_layer` of its own.

    Args:
        config: shape of the model, or of a rank's share of it.
        embedding: [vocab_size, hidden_size], or a rank's rows of it.
        layers: one `layer_type` per layer.
        norm: of the last layer's output.
        lm_head: output projection with fp32 results; its weight is `embedding` itself when the two
            are tied, unless it is packed.
        max_context: longest sequence served; sizes the RoPE table.
        batch_invariant: whether attention gives a sequence the same bits whatever others are served
            beside it, at the price of its fastest kernel for few sequences.
        communicator: joins the ranks that divide the model; None for one of its own.

    Raises:
        ValueError: when `max_context` exceeds the model's trained positions.
    """

    layer_type: ClassVar[type] = DecoderLayer

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[Any],
        norm: Norm,
        lm_head: Linear,
        *,
        max_context: int | None = None,
        batch_invariant: bool = True,
        communicator: Communicator | None = None,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.batch_invariant = batch_invariant
        self.communicator = communicator
        self.kv_scales: KVScales | None = None
        self.fingerprint: str | None = None
        self.max_context = config.context(max_context)
        self.attention = Attention(config, self.max_context, embedding.device)

    @staticmethod
    def input_kinds(config: ModelConfig) -> dict[str, InputKind]:
        """Return what comes before each linear layer of a decoder layer, by its field."""
        return input_kinds(config)

    @staticmethod
    def embedding_factor(config: ModelConfig) -> float:
        """Return what embeddings are multiplied by when they are loaded."""
        return config.embedding_scale

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        parts: DecoderLayout,
        loader: Loader,
        *,
        max_context: int | None = None,
        batch_invariant: bool = True,
    ) -> Self:
        """Return the decoder that a loader makes of these parts; see `registry.Load`."""
        embedding = parts.embedding.build(loader)
        lm_head = loader.head(parts.lm_head, embedding)
        norm = parts.norm.build(loader)
        if config.logits_scale != 1.0:
            lm_head, norm = lm_head.scaled(norm, config.logits_scale)
        if loader.communicator is not None:
            lm_head = GatheredHead(lm_head, loader.communicator, config.vocab_size)
        factor = cls.embedding_factor(config)
        if factor != 1.0:
            # Rounded as a product of the looked-up rows would be. A tied head keeps the original.
            embedding = embedding * factor
        return cls(
            config,
            embedding,
            [cls.layer_type(**build(layer, loader)) for layer in parts.layers],
            norm,
            lm_head,
            max_context=max_context,
            batch_invariant=batch_invariant,
            communicator=loader.communicator,
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def tensors(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        roots = [
            self.embedding,
            *tensors_of(self.norm),
            *self.attention.tables(),
            *self.lm_head.tensors(),
        ]
        for layer in self.layers:
            roots.extend(tensors_of(layer))
        for tensor in roots:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    def tables(self) -> Sequence[torch.Tensor]:
        """Return the RoPE tables, and the embedding unless the output projection reads it."""
        tables = tuple(self.attention.tables())
        if any(tensor is self.embedding for tensor in self.lm_head.tensors()):
            return tables
        return (*tables, self.embedding)

    def linears(self) -> Iterator[LinearUse]:
        for layer in self.layers:
            yield from self._layer_linears(layer)
        yield LinearUse("lm_head", self.config.norm.input_kind, self.lm_head)

    def experts(self) -> Iterator[ExpertsUse]:
        yield from ()

    def _layer_linears(self, layer: Any) -> Iterator[LinearUse]:
        """Yield the linear layers of one decoder layer."""
        for name, kind in self.input_kinds(self.config).items():
            yield LinearUse(name, kind, getattr(layer, name))

    def kernels(self, cache_format: KVFormat | None = None) -> list[Variant]:
        if cache_format is None:
            cache_format = kv_format(self.config, self.kv_scales)
        found = family_of(self.config).kernels(
            self.config, cache_format=cache_format, batch_invariant=self.batch_invariant
        )
        for _, kind, linear in self.linears():
            found += linear.kernels(kind, self.config.dtype)
        for _, experts in self.experts():
            found += experts.kernels(self.config.dtype)
        if self.communicator is None:
            found += gated_kernels(self.config.activation, found)
        else:
            found += collective_kernels(self.config.dtype, self.communicator.size, found)
        return found

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        cache: PagedKVCache,
        *,
        n_active: torch.Tensor | None = None,
        seen: SeenRows | None = None,
    ) -> torch.Tensor:
        """Append the tokens' keys and values to `cache` and return next-token logits.

        Shapes, dtypes and the other methods are those of `Decoder`.
        """
        call = Call(positions, attention, cache, n_active)
        return self.logits(*self._hidden(tokens, call, seen), n_active=n_active)

    def logits(
        self,
        x: Addend,
        residual: torch.Tensor,
        *,
        sampling: Sampling | None = None,
        n_active: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits, _ = self.lm_head.after_norm(x, residual, self.norm, n_active)
        return self._capped(logits.float(), n_active, sampling)

    def _capped(
        self, logits: torch.Tensor, n_active: torch.Tensor | None, sampling: Sampling | None
    ) -> torch.Tensor:
        """Cap logits in place, where the model does and the sampling may depend on it."""
        if self.config.logits_softcap:
            ops.softcap(
                logits,
                self.config.logits_softcap,
                temperature=None if sampling is None else sampling.temperature,
                repetition_penalty=None if sampling is None else sampling.repetition_penalty,
                n_active=n_active,
            )
        return logits

    def logits_to_sample(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        cache: PagedKVCache,
        sampling: Sampling,
        *,
        n_active: torch.Tensor | None = None,
        seen: SeenRows | None = None,
    ) -> ops.Logits:
        x, residual = self._hidden(tokens, Call(positions, attention, cache, n_active), seen)
        logits = self.lm_head.logits_after_norm(x, residual, self.norm, sampling, n_active)
        self._capped(logits.values, n_active, sampling)
        return logits

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        cache: PagedKVCache,
        *,
        n_active: torch.Tensor | None = None,
        seen: SeenRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = Call(positions, attention, cache, n_active)
        x, residual = self._hidden(tokens, call, seen)
        return summed(x), residual

    def _hidden(
        self, tokens: torch.Tensor, call: Call, seen: SeenRows | None
    ) -> tuple[Addend, torch.Tensor]:
        """Do as `hidden`; the last layer's output may be a rank's part of a sum."""
        residual = None
        x = self._embed(tokens, call.n_active, seen)
        for index in range(len(self.layers)):
            x, residual = self._layer(index, x, residual, call)
        assert residual is not None, "a model has a layer"
        return x, residual

    def _layer(
        self, index: int, x: Addend, residual: torch.Tensor | None, call: Call
    ) -> tuple[Addend, torch.Tensor]:
        """Compute a layer: of x and what is to be added to it, [T, hidden_size] each, the next."""
        layer, n_active = self.layers[index], call.n_active
        qkv, residual = layer.qkv.after_norm(x, residual, layer.input_norm, n_active)
        x = layer.o(self._attend(index, qkv, call), n_active)
        if layer.attention_output_norm is not None:
            x = layer.attention_output_norm(x)
        norm = layer.post_attention_norm
        kind = self.config.activation
        x, residual = mlp_after_norm(layer.gate_up, layer.down, x, residual, norm, kind, n_active)
        if layer.mlp_output_norm is not None:
            x = layer.mlp_output_norm(x)
        return x, residual

    def _embed(
        self, tokens: torch.Tensor, n_active: torch.Tensor | None, seen: SeenRows | None
    ) -> Addend:
        first_id, vocabulary, ranks = 0, self.config.vocab_size, self.communicator
        if ranks is not None:
            first_id = ranks.rank * uneven_width(vocabulary, ranks.size)
        x = ops.embed(
            tokens,
            self.embedding,
            seen=None if seen is None else seen.mask,
            seen_rows=None if seen is None else seen.rows,
            first_id=first_id,
            vocabulary=vocabulary,
            n_active=n_active,
        )
        return x if ranks is None else PartialSum(x, ranks)

    def _attend(self, index: int, qkv: torch.Tensor, call: Call) -> torch.Tensor:
        """Return what attention makes of qkv [T, q_size + 2 kv_size]: [T, q_size]."""
        layer = self.layers[index]
        q, k, v = self._heads(layer, qkv)
        return self.attention(
            index,
            q,
            k,
            v,
            call.positions,
            call.attention,
            call.cache,
            norms=HeadNorms(layer.q_norm, layer.k_norm),
            sinks=layer.sinks,
            batch_invariant=self.batch_invariant,
        )

    def _heads(
        self, layer: Any, qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the q [T, q_size], k and v [T, kv_size] of a layer."""
        config = self.config
        q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=1)
        if layer.all_q_norm is not None:
            q, k = normalized_heads(layer.all_q_norm, layer.all_k_norm, q, k)
        return q, k, v


def input_kinds(config: ModelConfig) -> dict[str, InputKind]:
    """Return what comes before each linear layer of a layer of Llama's kind."""
    norm = config.norm.input_kind
    return {"qkv": norm, "o": "per_token", "gate_up": norm, "down": config.activation}


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape, in the names of Hugging Face files."""
    return layout_of(config, layer_parts)


def layout_of(config: ModelConfig, layer: Callable[[ModelConfig, int], Any]) -> DecoderLayout:
    """Return the parts of a decoder with layers of another kind.

    Args:
        config: shape of the model.
        layer: returns the parts of the layer of an index.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    tied = config.tie_word_embeddings
    names = ("model.embed_tokens.weight", "lm_head.weight")
    copy = TensorSpec(names[1:], (vocabulary,), required=False)
    # Of tied weights `safetensors.torch.save_model` keeps the name that sorts first.
    embedding = TensorSpec(names if tied else names[:1], (vocabulary,))
    head = LinearPart(
        (Module("lm_head", *vocabulary, uneven=True),), config.norm.input_kind, "rows"
    )
    return DecoderLayout(
        embedding=TensorPart(embedding, divided=True, uneven=True),
        layers=tuple(layer(config, index) for index in range(config.num_layers)),
        norm=norm_part(config, "model.norm"),
        lm_head=None if tied else head,
        tied_output=TensorPart(copy) if tied else None,
    )


def layer_parts(config: ModelConfig, index: int) -> LayerParts:
    """Return the parts of a layer of Llama's kind."""
    prefix = f"model.layers.{index}."
    hidden, intermediate = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads, config.num_kv_heads
    kinds = input_kinds(config)
    gated = config.activation in GATED

    def projection(name: str, rows: int, units: int, replicated: bool = False) -> Module:
        return Module(f"{prefix}self_attn.{name}", rows, hidden, config.qkv_bias, units, replicated)

    def linear(name: str, *modules: Module) -> LinearPart:
        divide: Literal["rows", "columns"] = "columns" if name in ("o", "down") else "rows"
        return LinearPart(modules, kinds[name], divide, _FOLDED_INTO[name])

    def head_norm(name: str) -> NormPart | None:
        if not config.qk_norm:
            return None
        return norm_part(config, f"{prefix}self_attn.{name}", (config.head_dim,))

    def mlp(name: str) -> Module:
        return Module(f"{prefix}mlp.{name}", intermediate, hidden, config.mlp_bias)

    output = Module(
        f"{prefix}self_attn.o_proj", hidden, config.q_size, config.o_bias, column_units=heads
    )
    return LayerParts(
        input_norm=norm_part(config, f"{prefix}input_layernorm"),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        post_attention_norm=norm_part(config, f"{prefix}post_attention_layernorm"),
        qkv=linear(
            "qkv",
            projection("q_proj", config.q_size, heads),
            projection("k_proj", config.kv_size, kv_heads, replicated=True),
            projection("v_proj", config.kv_size, kv_heads, replicated=True),
        ),
        o=linear("o", output),
        gate_up=linear("gate_up", *((mlp("gate_proj"),) if gated else ()), mlp("up_proj")),
        down=linear(
            "down", Module(f"{prefix}mlp.down_proj", hidden, intermediate, config.mlp_bias)
        ),
    )


def norm_part(config: ModelConfig, name: str, shape: tuple[int, ...] | None = None) -> NormPart:
    """Return a norm of the model's kind; `shape` of its weight is by default [hidden_size]."""
    shape = shape or (config.hidden_size,)
    bias = TensorSpec((f"{name}.bias",), (shape,)) if config.norm.has_bias else None
    return NormPart(TensorSpec((f"{name}.weight",), (shape,)), bias, config.norm)


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return standard_config(fields, windows=full_attention, qkv_bias=bias, o_bias=bias)


_TEXT_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}

register(
    Family(
        "llama",
        ("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second in the first conversions
        _config,
        layout,
        Llama.load,
        defaults=LLAMA_IDS,
        text_defaults=_TEXT_DEFAULTS,
    )
)
