"""Llama 2 and 3: the decoder layer that Mistral, Qwen2 and Qwen3 share with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ... import ops
from ...jit.variant import Variant
from ..cache import PagedKVCache
from ..config import LLAMA_IDS, ModelConfig, full_attention, standard_config
from ..config_fields import Fields
from ..decoder import AttentionInputs, Decoder, LinearUse, SeenRows
from ..layers import InputKind, Linear, Sampling, tensors_of
from ..parts import DecoderLayout, LinearPart, Loader, Module, TensorPart, TensorSpec, build
from ..registry import Family, register
from ..required_kernels import model_kernels

# What comes before each linear layer of a decoder layer.
INPUT_KINDS: dict[str, InputKind] = {
    "qkv": "rms_norm",
    "o": "per_token",
    "gate_up": "rms_norm",
    "down": "silu_mul",
}
HEAD_KIND: InputKind = "rms_norm"


@dataclass
class DecoderLayer:
    """Weights of one layer. `qkv` rows are [q; k; v], `gate_up` rows [gate; up]."""

    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerParts:
    """The parts of one layer, by the fields of `DecoderLayer`."""

    input_norm: TensorPart
    q_norm: TensorPart | None
    k_norm: TensorPart | None
    post_attention_norm: TensorPart
    qkv: LinearPart
    o: LinearPart
    gate_up: LinearPart
    down: LinearPart


class Llama(Decoder):
    """A decoder over a paged KV cache. It holds weights and no state between calls.

    Args:
        config: shape of the model.
        embedding: [vocab_size, hidden_size].
        layers: one `DecoderLayer` per layer.
        norm: weight of the final RMS norm, [hidden_size].
        lm_head: output projection; its weight is `embedding` itself when the two are tied.
        max_context: longest sequence served; sizes the RoPE table.
        batch_invariant: whether attention gives a sequence the same bits whatever others are served
            beside it, at the price of its fastest kernel for few sequences.

    Raises:
        ValueError: when `max_context` exceeds the model's trained positions.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        lm_head: Linear,
        *,
        max_context: int | None = None,
        batch_invariant: bool = True,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.batch_invariant = batch_invariant
        self.max_context = config.context(max_context)
        table = config.rope.cos_sin_table(config.head_dim, self.max_context)
        self.cos_sin = table.to(embedding.device)

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
        return cls(
            config,
            embedding,
            [DecoderLayer(**build(layer, loader)) for layer in parts.layers],
            parts.norm.build(loader),
            lm_head,
            max_context=max_context,
            batch_invariant=batch_invariant,
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def tensors(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        roots = [self.embedding, self.norm, self.cos_sin, *self.lm_head.tensors()]
        for layer in self.layers:
            roots.extend(tensors_of(layer))
        for tensor in roots:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    def tables(self) -> Sequence[torch.Tensor]:
        """Return the RoPE table, and the embedding unless the output projection reads it."""
        head = self.lm_head.tensors()
        if any(tensor is self.embedding for tensor in head):
            return (self.cos_sin,)
        return (self.cos_sin, self.embedding)

    def linears(self) -> Iterator[LinearUse]:
        for layer in self.layers:
            for name, kind in INPUT_KINDS.items():
                yield LinearUse(name, kind, getattr(layer, name))
        yield LinearUse("lm_head", HEAD_KIND, self.lm_head)

    def kernels(self) -> list[Variant]:
        found = model_kernels(self.config, batch_invariant=self.batch_invariant)
        for _, kind, linear in self.linears():
            found += linear.kernels(kind, self.config.dtype)
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
        x, residual = self.hidden(tokens, positions, attention, cache, n_active=n_active, seen=seen)
        return self.logits(x, residual, n_active=n_active)

    def logits(
        self, x: torch.Tensor, residual: torch.Tensor, *, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        logits, _ = self.lm_head.after_norm(x, residual, self.norm, eps, n_active)
        return logits.float()

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
        x, residual = self.hidden(tokens, positions, attention, cache, n_active=n_active, seen=seen)
        eps = self.config.rms_norm_eps
        return self.lm_head.logits_after_norm(x, residual, self.norm, eps, sampling, n_active)

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
        eps = self.config.rms_norm_eps
        residual = None
        x = self._embed(tokens, n_active, seen)
        for index, layer in enumerate(self.layers):
            qkv, residual = layer.qkv.after_norm(x, residual, layer.input_norm, eps, n_active)
            x = layer.o(self._attend(index, layer, qkv, positions, attention, cache), n_active)
            gate_up, residual = layer.gate_up.after_norm(
                x, residual, layer.post_attention_norm, eps, n_active
            )
            x = layer.down.after_silu_mul(gate_up, n_active)
        assert residual is not None, "a model has a layer"
        return x, residual

    def _embed(
        self, tokens: torch.Tensor, n_active: torch.Tensor | None, seen: SeenRows | None
    ) -> torch.Tensor:
        return ops.embed(
            tokens,
            self.embedding,
            seen=None if seen is None else seen.mask,
            seen_rows=None if seen is None else seen.rows,
            n_active=n_active,
        )

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        cache: PagedKVCache,
    ) -> torch.Tensor:
        config = self.config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = qkv.view(qkv.size(0), -1, config.head_dim).split(heads, dim=1)
        k_cache, v_cache = cache.layer(index)
        q = ops.append_kv(
            k,
            v,
            k_cache,
            v_cache,
            attention.slot_mapping,
            positions=positions,
            cos_sin=self.cos_sin,
            q=q,
            q_norm_weight=layer.q_norm,
            k_norm_weight=layer.k_norm,
            norm_eps=config.rms_norm_eps,
        )
        assert q is not None, "q was given"
        window = config.sliding_windows[index]
        # Given, it is not zeroed for the sake of rows that belong to no sequence.
        out = torch.empty_like(q)
        ops.paged_attention(
            q,
            k_cache,
            v_cache,
            attention.page_table,
            attention.seq_lens,
            cu_seqlens_q=attention.cu_seqlens_q,
            max_seqlen_q=attention.max_seqlen_q,
            # A window of w keys counts the query's own position; the op counts those before it.
            window=None if window is None else (window - 1, 0),
            batch_invariant=self.batch_invariant,
            l2_partition=cache.l2_partition,
            out=out,
        )
        return out.flatten(1)


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape, in the names of Hugging Face files."""
    vocabulary = (config.vocab_size, config.hidden_size)
    tied = config.tie_word_embeddings
    names = ("model.embed_tokens.weight", "lm_head.weight")
    copy = TensorSpec(names[1:], (vocabulary,), required=False)
    # Of tied weights `safetensors.torch.save_model` keeps the name that sorts first.
    embedding = TensorSpec(names if tied else names[:1], (vocabulary,))
    head = LinearPart((Module("lm_head", *vocabulary),), HEAD_KIND, "rows")
    return DecoderLayout(
        embedding=TensorPart(embedding, True),
        layers=tuple(_layer(config, index) for index in range(config.num_layers)),
        norm=_norm("model.norm", config.hidden_size),
        lm_head=None if tied else head,
        tied_output=TensorPart(copy) if tied else None,
    )


def _layer(config: ModelConfig, index: int) -> LayerParts:
    prefix = f"model.layers.{index}."
    hidden, intermediate = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def projection(name: str, rows: int, units: int, replicated: bool = False) -> Module:
        return Module(f"{prefix}self_attn.{name}", rows, hidden, config.qkv_bias, units, replicated)

    def linear(name: str, *modules: Module) -> LinearPart:
        if name in ("o", "down"):
            return LinearPart(modules, INPUT_KINDS[name], "columns")
        return LinearPart(modules, INPUT_KINDS[name], "rows")

    def head_norm(name: str) -> TensorPart | None:
        return _norm(f"{prefix}self_attn.{name}", config.head_dim) if config.qk_norm else None

    def mlp(name: str) -> Module:
        return Module(f"{prefix}mlp.{name}", intermediate, hidden, config.mlp_bias)

    output = Module(
        f"{prefix}self_attn.o_proj", hidden, config.q_size, config.o_bias, column_units=heads
    )
    return LayerParts(
        input_norm=_norm(f"{prefix}input_layernorm", hidden),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        post_attention_norm=_norm(f"{prefix}post_attention_layernorm", hidden),
        qkv=linear(
            "qkv",
            projection("q_proj", config.q_size, heads),
            projection("k_proj", config.kv_size, kv_heads, replicated=True),
            projection("v_proj", config.kv_size, kv_heads, replicated=True),
        ),
        o=linear("o", output),
        gate_up=linear("gate_up", mlp("gate_proj"), mlp("up_proj")),
        down=linear(
            "down", Module(f"{prefix}mlp.down_proj", hidden, intermediate, config.mlp_bias)
        ),
    )


def _norm(name: str, size: int) -> TensorPart:
    return TensorPart(TensorSpec((f"{name}.weight",), ((size,),)))


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return standard_config(fields, windows=full_attention, qkv_bias=bias, o_bias=bias)


register(Family("llama", ("LlamaForCausalLM",), _config, layout, Llama.load, defaults=LLAMA_IDS))
