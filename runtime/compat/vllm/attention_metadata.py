"""What a step's attention needs beside a layer's own tensors: made once, read by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import (
    get_num_attention_heads_from_layers,
    split_decodes_and_prefills,
)

from ... import ops
from ...ops.attention import decode_cuda
from ...ops.attention.append_kv_cuda import append_kernel
from ...ops.attention.dequantize_kv import prompt_kernels
from ...ops.common.sizes import power_of_two
from ...ops.linear.precompile import Variant, precompile
from .kv_views import CACHE_DTYPES


@dataclass(frozen=True)
class Part:
    """Sequences whose attention is one call of `ops.paged_attention`.

    Args:
        first: row of the first query.
        last: row behind the last.
        page_table: [sequences, max_pages] int32.
        seq_lens: [sequences] int32.
        cu_seqlens_q: [sequences + 1] int32 from `first` on; None where each has max_seqlen_q rows.
        max_seqlen_q: the most rows of a sequence.
        max_tokens_k: of prompts over an 8-bit cache, as of `ops.paged_attention`, whose scratch
            memory is the op's own: it grows with them. None of others.
    """

    first: int
    last: int
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int
    max_tokens_k: int | None = None


@dataclass
class OstinatoMetadata(AttentionMetadata):
    """A step: its decodes and its prompts, of which either may be missing."""

    parts: tuple[Part, ...]
    workspace: torch.Tensor
    causal: bool
    slot_mapping: torch.Tensor


class OstinatoMetadataBuilder(AttentionMetadataBuilder):
    """Splits a batch into decodes, which stand in front, and prompts.

    Decodes all have as many queries, one or one more than there are speculative tokens, so that a
    captured graph serves any lengths: they are read on the GPU.
    """

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._cache_dtype = CACHE_DTYPES.get(kv_cache_spec.kv_quant_mode, self._dtype)
        heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        if heads is None:
            heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self._heads = heads
        self._most_sequences: int = vllm_config.scheduler_config.max_num_seqs
        self._most_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self._workspaces: list[torch.Tensor] = []
        self._sizes = (0, 0)  # sequences and pages of each, for which the last one is made
        if device.type == "cuda":
            precompile(self._kernels(), device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> OstinatoMetadata:
        """Return the metadata of a step.

        Raises:
            ValueError: when a query may see keys after its own position in some sequences alone.
        """
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise ValueError("causal: got a tensor, expected one bool for all sequences")
        decodes, prompts, decode_rows, rows = self._split(common)
        table, lens = common.block_table_tensor, common.seq_lens
        parts = []
        if decode_rows:
            # Behind the decodes of a batch there may be padding: sequences without queries.
            count = decode_rows // rows
            parts.append(Part(0, rows * count, table[:count], lens[:count], None, rows))
        if prompts:
            starts = common.query_start_loc[decodes : decodes + prompts + 1]
            parts.append(
                Part(
                    decode_rows,
                    common.num_actual_tokens,
                    table[decodes : decodes + prompts],
                    lens[decodes : decodes + prompts],
                    starts - decode_rows if decode_rows else starts,
                    int(common.max_query_len),  # of virtual batches a number of numpy
                    self._tokens_of(common, decodes, prompts),
                )
            )
        return OstinatoMetadata(
            tuple(parts), self._workspace(table), common.causal, common.slot_mapping
        )

    def _split(self, common: Any) -> tuple[int, int, int, int]:
        """Return how many decodes, prompts and rows of decodes there are, and rows of a decode."""
        if common.max_query_len == 1:
            return common.num_reqs, 0, common.num_actual_tokens, 1
        if type(self) is not OstinatoMetadataBuilder and self.device.type == "cuda":
            # vLLM derives a builder where layers compute fewer rows (--kv-sharing-fast-prefill):
            # their offsets are still on their way to the host.
            torch.cuda.current_stream(self.device).synchronize()
        decodes, prompts, decode_rows, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        return decodes, prompts, decode_rows, int(common.query_start_loc_cpu[1])

    def _tokens_of(self, common: Any, decodes: int, prompts: int) -> int | None:
        """Return how many tokens prompts over an 8-bit cache have at most; of others None.

        A power of two, so that what is kept for them grows a few times, not in every step.
        """
        if self._cache_dtype == self._dtype:
            return None
        lens = common.seq_lens_cpu_upper_bound
        if lens is None:
            return power_of_two(prompts * int(common.max_seq_len))
        # What a drafter has added to the lengths since, vLLM has not told the host.
        drafts = prompts * ((self.reorder_batch_threshold or 1) - 1)
        return power_of_two(int(lens[decodes : decodes + prompts].sum()) + drafts)

    def _kernels(self) -> list[Variant]:
        """Return what a step may launch, since nothing is compiled while a graph is captured."""
        spec, how = self.kv_cache_spec, {"batch_invariant": self._batch_invariant}
        prompts = prompt_kernels(self._dtype, spec.head_size, self._cache_dtype, **how)
        group = self._heads // spec.num_kv_heads
        decodes = decode_cuda.decode_kernels(
            self._dtype, spec.head_size, group, kv_dtype=self._cache_dtype, **how
        )
        # Blocks are multiples of 16 tokens, which the kernels copy as a whole.
        whole = [kernel for kernel in decodes if kernel.copy_pages]
        return [append_kernel(self._dtype, self._cache_dtype), *prompts, *whole]

    def _workspace(self, table: torch.Tensor) -> torch.Tensor:
        """Return the scratch memory of all layers' calls; it is made at the first step, and stays.

        The layers of a step run one after another, and each builder serves one stream at a time.
        One for a wider page table may follow; graphs keep those that they were captured with.
        """
        sequences, pages = table.shape
        if sequences > self._sizes[0] or pages > self._sizes[1]:
            sequences = max(sequences, self._most_sequences, self._sizes[0])
            pages = max(pages, self._sizes[1])
            self._sizes = (sequences, pages)
            needed = ops.paged_attention_workspace(
                self._dtype,
                self._heads,
                self.kv_cache_spec.num_kv_heads,
                self.kv_cache_spec.head_size,
                max_batch=sequences,
                max_pages=pages,
                page_size=self.kv_cache_spec.block_size,
                max_seqlen_q=self._most_tokens,
                max_tokens_k=0,  # prompts over an 8-bit cache have memory of their own
                kv_dtype=self._cache_dtype,
                batch_invariant=self._batch_invariant,
                device=self.device,
            )
            self._workspaces.append(torch.zeros(needed, dtype=torch.uint8, device=self.device))
        return self._workspaces[-1]
