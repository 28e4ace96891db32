"""What the engine, the cache and the benchmarks know of a model: the `Decoder` protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .. import ops
from ..jit.variant import Variant
from ..ops.collective.communicator import Communicator
from .cache import PagedKVCache
from .config import ModelConfig
from .experts.products import Experts
from .kinds import InputKind
from .kv_format import KVFormat, KVScales
from .layers import Linear, Sampling


@dataclass(frozen=True)
class TextRows:
    """Sequences of which a call has one token each, in its first R rows, on the model's device.

    `page_table` [R, P] int32, `seq_lens` [R] int32: as of `AttentionInputs`. A row whose length is
    0 belongs to none of them.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor


@dataclass
class AttentionInputs:
    """Places of this call's tokens in the paged KV cache; all tensors on the model's device.

    `slot_mapping` [T] int64: cache slot (page * page_size + offset) of each token, -1 to skip.
    `page_table` [B, P] int32, `seq_lens` [B] int32: KV length including this call's tokens.
    `cu_seqlens_q` [B + 1] int32: row offsets of the sequences; None when every sequence has
    exactly `max_seqlen_q` tokens, as in decode. `max_tokens_k`: as of `ops.paged_attention`.
    `texts`: more sequences, whose tokens have rows before those of `cu_seqlens_q`.
    """

    slot_mapping: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 1
    max_tokens_k: int | None = None
    texts: TextRows | None = None


@dataclass(frozen=True)
class SeenRows:
    """Rows of the table of seen tokens that this call's tokens mark, on the model's device.

    `mask` [S, vocab_size] bool, `rows` [T] int64: which row of `mask` is each token's.
    """

    mask: torch.Tensor
    rows: torch.Tensor


class LinearUse(NamedTuple):
    """A linear layer of a decoder, and how it is used.

    Attributes:
        name: of the part of a decoder layer, such as "qkv", or "lm_head".
        kind: what comes before it.
        linear: the layer.
    """

    name: str
    kind: InputKind
    linear: Linear


class ExpertsUse(NamedTuple):
    """The products of a layer's experts.

    Attributes:
        name: of the part of a decoder layer, such as "experts_gate_up".
        experts: the products, of which each token is in `top_k` of `config.experts`.
    """

    name: str
    experts: Experts


class Decoder(Protocol):
    """A decoder over a paged KV cache. It holds weights and no state between calls.

    Attributes:
        config: its shape, or that of a rank's share.
        max_context: the longest sequence served.
        batch_invariant: whether a sequence gets the same bits whatever is served beside it.
        kv_scales: the 8-bit KV cache that the checkpoint is made for, if it is; see `kv_format`.
        communicator: joins the ranks that divide the model; None for one of its own. Then all ranks
            make the same calls, in one order, with equal arguments: they compute equal logits. Each
            has a cache of its own, of the KV heads of its `config`.
        fingerprint: what the models of all ranks must have in common, as it was loaded from a
            checkpoint: an `Engine` over ranks refuses others. None for one that was made otherwise.
    """

    config: ModelConfig
    max_context: int
    batch_invariant: bool
    kv_scales: KVScales | None
    communicator: Communicator | None
    fingerprint: str | None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor the model owns once, tied weights included once."""

    def tables(self) -> Sequence[torch.Tensor]:
        """Return the tensors of which a step gathers a few rows: it does not read the rest."""

    def linears(self) -> Iterator[LinearUse]:
        """Yield every linear layer, layer by layer; the output projection is the last."""

    def experts(self) -> Iterator[ExpertsUse]:
        """Yield the products of all mixtures of experts, layer by layer."""

    def kernels(self, cache_format: KVFormat | None = None) -> list[Variant]:
        """Return the kernels the model launches for any number of tokens, on its GPU or an H200.

        Some may be named more than once.

        Args:
            cache_format: of the KV cache; None: what the checkpoint is made for.
        """

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

    def logits(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        *,
        sampling: Sampling | None = None,
        n_active: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return next-token logits [R, vocab_size] fp32 of R rows of what `hidden` returned.

        With `sampling` of these rows, those of greedy ones may be before their softcap, as those of
        `logits_to_sample`.
        """

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

        `sampling` is of the rows [T]; logits of greedy ones may be undefined (see `ops.Logits`), or
        before their softcap.
        """
