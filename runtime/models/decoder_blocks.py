"""The decoder of the Llama family; its members differ only in which parts are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from .. import ops
from .cache import PagedKVCache
from .config import ModelConfig
from .layers import (
    AnyLinear,
    Sampling,
)


@dataclass
class AttentionInputs:
    """Where this call's tokens sit in the paged KV cache; all tensors on the model's device.

    `slot_mapping` [T] int64: cache slot (page * page_size + offset) of each token, -1 to skip.
    `page_table` [B, P] int32, `seq_lens` [B] int32: KV length including this call's tokens.
    `cu_seqlens_q` [B + 1] int32: row offsets of the sequences; None when every sequence has
    exactly `max_seqlen_q` tokens, as in decode.
    """

    slot_mapping: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 1


@dataclass(frozen=True)
class SeenRows:
    """Where this call's tokens are noted as seen, on the model's device.

    `mask` [S, vocab_size] bool, `rows` [T] int64: which row of `mask` is each token's.
    """

    mask: torch.Tensor
    rows: torch.Tensor


@dataclass
class DecoderLayer:
    """Weights of one layer. `qkv` rows are [q; k; v], `gate_up` rows [gate; up]."""

    input_norm: torch.Tensor
    qkv: AnyLinear
    o: AnyLinear
    post_attention_norm: torch.Tensor
    gate_up: AnyLinear
    down: AnyLinear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


class Llama:
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
        lm_head: AnyLinear,
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

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor the model owns once, tied weights included once."""
        seen: set[int] = set()
        roots = [self.embedding, self.norm, self.cos_sin, *_tensors_of(self.lm_head)]
        for layer in self.layers:
            roots.extend(_tensors_of(layer))
        for tensor in roots:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

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

        Args:
            tokens: [T] int64 ids, the sequences one after another.
            positions: [T] int32 position of each token in its sequence.
            attention: where the sequences sit in the cache.
            cache: keys and values of the sequences so far.
            n_active: int32 [1] on the device, how many of the first rows are real; the others are
                padding, whose logits mean nothing. All by default.
            seen: where to note the tokens, before anything else is done with them.

        Returns:
            logits [T, vocab_size] fp32.
        """
        x, residual = self.hidden(tokens, positions, attention, cache, n_active=n_active, seen=seen)
        return self.logits(x, residual, n_active=n_active)

    def logits(
        self, x: torch.Tensor, residual: torch.Tensor, *, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return next-token logits [R, vocab_size] fp32 of R rows of what `hidden` returned."""
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
        """Do as a call, and return what `ops.sample` chooses the same tokens from.

        `sampling` is of the rows [T]; logits of greedy ones may be undefined (see `ops.Logits`).
        """
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
        """Do as a call, up to the last layer's output and the residual to add to it.

        Both are [T, hidden_size] of the model's dtype.
        """
        eps = self.config.rms_norm_eps
        residual = None
        x = ops.embed(
            tokens,
            self.embedding,
            seen=None if seen is None else seen.mask,
            seen_rows=None if seen is None else seen.rows,
            n_active=n_active,
        )
        for index, layer in enumerate(self.layers):
            qkv, residual = layer.qkv.after_norm(x, residual, layer.input_norm, eps, n_active)
            x = layer.o(self._attend(index, layer, qkv, positions, attention, cache), n_active)
            gate_up, residual = layer.gate_up.after_norm(
                x, residual, layer.post_attention_norm, eps, n_active
            )
            x = layer.down.after_silu_mul(gate_up, n_active)
        assert residual is not None, "a model has a layer"
        return x, residual

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
            halves=cache.halves,
            out=out,
        )
        return out.flatten(1)


def _tensors_of(part: object) -> Iterator[torch.Tensor]:
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "__dataclass_fields__"):
            yield from _tensors_of(value)
