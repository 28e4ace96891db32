"""Attention of a decoder layer: norms of heads, RoPE, the append to the cache, softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from .. import ops
from .cache import PagedKVCache
from .config import ModelConfig
from .decoder import AttentionInputs
from .norms import Norm
from .rope import RopeConfig


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding as `append_kv` reads it.

    Attributes:
        cos_sin: [positions, rotary_dim] fp32, for keys, and for queries as well without
            `query_cos_sin`.
        query_cos_sin: [positions, head_dim] likewise, times the factors of queries.
        interleaved: which elements are rotated together.
    """

    cos_sin: torch.Tensor
    query_cos_sin: torch.Tensor | None
    interleaved: bool


def rotation(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> Rotation:
    """Return the tables of a rotary embedding for so many positions."""
    table = rope.cos_sin_table(head_dim, max_positions)
    scales = rope.query_scales(max_positions)
    queries = None if scales is None else (table * scales[:, None]).to(device)
    return Rotation(table.to(device), queries, rope.interleaved)


@dataclass(frozen=True)
class HeadNorms:
    """Norms of heads of q and k, of one kind; None where there is none.

    RMS norms have weights [head_dim], and `append_kv` computes them. Layer norms have weights
    [heads, head_dim], and are computed before heads are rotated.
    """

    q: Norm | None
    k: Norm | None

    @property
    def eps(self) -> float:
        """That of both."""
        return max((norm.eps for norm in (self.q, self.k) if norm is not None), default=0.0)

    def before_append(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, HeadNorms]:
        """Return q and k [T, heads, head_dim], normalised by layer norms, and the norms left."""
        if self.q is None or self.k is None or self.q.kind == "rms_norm":
            return q, k, self
        return self.q(q), self.k(k), HeadNorms(None, None)


class Attention:
    """How the layers of a decoder attend; it holds the tables of RoPE and no weights.

    Args:
        config: shape of the model.
        max_context: longest sequence served; sizes the tables.
        device: of the tables.
    """

    def __init__(self, config: ModelConfig, max_context: int, device: torch.device) -> None:
        self._config = config
        made = {r: rotation(r, config.head_dim, max_context, device) for r in config.rotations}
        self._tables = tuple(made.values())
        self.rotations = tuple(None if rope is None else made[rope] for rope in config.ropes)

    def tables(self) -> Iterator[torch.Tensor]:
        """Yield every table, of which a step gathers a few rows."""
        for made in self._tables:
            yield made.cos_sin
            if made.query_cos_sin is not None:
                yield made.query_cos_sin

    def __call__(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        inputs: AttentionInputs,
        cache: PagedKVCache,
        *,
        norms: HeadNorms,
        sinks: torch.Tensor | None = None,
        batch_invariant: bool,
    ) -> torch.Tensor:
        """Append k and v to the cache of a layer, and attend to it.

        Args:
            index: of the layer.
            q: [T, q_size], rows of any stride.
            k: [T, kv_size], likewise.
            v: like k.
            positions: [T] int32, as of a `Decoder`.
            inputs: where the tokens sit, likewise.
            cache: keys and values, likewise.
            norms: of the heads of q and k.
            sinks: as of `ops.paged_attention`.
            batch_invariant: likewise.

        Returns:
            [T, q_size].
        """
        config = self._config
        q, k, v = (x.unflatten(1, (-1, config.head_dim)) for x in (q, k, v))
        q, k, norms = norms.before_append(q, k)
        q = self._append(index, q, k, v, positions, inputs, cache, norms)
        layer = cache.layer(index)
        k_scale, v_scale = layer.stored_scales
        window = config.sliding_windows[index]
        attend = partial(
            ops.paged_attention,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            # A window of w keys counts the query's own position; the op counts those before it.
            window=None if window is None else (window - 1, 0),
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            batch_invariant=batch_invariant,
            l2_partition=cache.l2_partition,
        )
        # Given, it is not zeroed for the sake of rows that belong to no sequence.
        out = torch.empty_like(q)
        if inputs.texts is not None:
            # First: it writes to rows of prompts, too, where there are fewer texts.
            table, lens = inputs.texts.page_table, inputs.texts.seq_lens
            rows = slice(len(lens))
            attend(q[rows], layer.k, layer.v, table, lens, out=out[rows])
        attend(
            q,
            layer.k,
            layer.v,
            inputs.page_table,
            inputs.seq_lens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_seqlen_q,
            max_tokens_k=inputs.max_tokens_k,
            out=out,
        )
        return out.flatten(1)

    def _append(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        inputs: AttentionInputs,
        cache: PagedKVCache,
        norms: HeadNorms,
    ) -> torch.Tensor:
        """Write k and v [T, heads, head_dim] to the cache; return q as attention takes it."""
        rotated, layer = self.rotations[index], cache.layer(index)

        def append(table: torch.Tensor | None, queries: torch.Tensor | None) -> torch.Tensor | None:
            return ops.append_kv(
                k,
                v,
                layer.k,
                layer.v,
                inputs.slot_mapping,
                positions=None if table is None else positions,
                cos_sin=table,
                q=queries,
                interleaved=rotated is not None and rotated.interleaved,
                q_norm_weight=None if queries is None or norms.q is None else norms.q.weight,
                k_norm_weight=None if norms.k is None else norms.k.weight,
                norm_eps=norms.eps,
                norm_after_rotation=self._config.qk_norm_after_rope,
                k_scale=layer.k_scale,
                v_scale=layer.v_scale,
                k_scale_out=layer.k_scale_out,
                v_scale_out=layer.v_scale_out,
            )

        if rotated is None or rotated.query_cos_sin is None:
            result = append(None if rotated is None else rotated.cos_sin, q)
        else:
            # The op rotates q and k by one table: the second call writes the keys once more.
            result = append(rotated.query_cos_sin, q)
            append(rotated.cos_sin, None)
        assert result is not None, "q was given"
        return result
