"""How a batch of vLLM is split into calls of our attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm_batches import CACHES, common_of, config_of, spec_of

from ostinato.compat.vllm.attention_metadata import OstinatoMetadataBuilder
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.attention.decode_variants import AttentionDecode
from ostinato.ops.attention.dequantize_kv import DequantizeKV
from ostinato.ops.attention.prefill_variants import AttentionPrefill

pytestmark = pytest.mark.usefixtures("hopper")
CPU = torch.device("cpu")


def builder_of(*, speculative: int = 0) -> OstinatoMetadataBuilder:
    config = config_of(CPU)
    if speculative:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=speculative, parallel_drafting=False
        )
    return OstinatoMetadataBuilder(spec_of("auto"), [], config, CPU)


def table_of(sequences: int) -> torch.Tensor:
    return torch.arange(4 * sequences, dtype=torch.int32).view(sequences, 4)


def spans(metadata: Any) -> list[tuple[int, int, int, int, bool]]:
    """Return of each part its rows, its sequences, their most rows, and if they are all alike."""
    return [
        (p.first, p.last, p.seq_lens.size(0), p.max_seqlen_q, p.cu_seqlens_q is None)
        for p in metadata.parts
    ]


def test_decodes_are_one_call_without_offsets() -> None:
    metadata = builder_of().build(0, common_of([1, 1, 1], [4, 9, 2], table_of(3)))
    assert spans(metadata) == [(0, 3, 3, 1, True)]


def test_prompts_are_one_call_with_offsets() -> None:
    metadata = builder_of().build(0, common_of([4, 2], [4, 9], table_of(2)))
    assert spans(metadata) == [(0, 6, 2, 4, False)]
    assert metadata.parts[0].cu_seqlens_q.tolist() == [0, 4, 6]


def test_a_mixed_batch_is_two_calls() -> None:
    metadata = builder_of().build(0, common_of([1, 1, 4, 2], [4, 9, 4, 3], table_of(4)))
    assert spans(metadata) == [(0, 2, 2, 1, True), (2, 8, 2, 4, False)]
    assert metadata.parts[1].cu_seqlens_q.tolist() == [0, 4, 6]
    assert metadata.parts[1].page_table.tolist() == table_of(4)[2:].tolist()


def test_a_padded_graph_takes_padding_as_decodes() -> None:
    common = common_of([1, 1, 0, 0], [4, 9, 0, 0], table_of(4), tokens=4)
    assert spans(builder_of().build(0, common)) == [(0, 4, 4, 1, True)]


def test_prompts_over_8_bits_say_how_many_tokens_they_have() -> None:
    """Decodes in front of them do not count; their memory is that of the call."""
    common = common_of([1, 1, 4, 2], [4, 9, 4, 3], table_of(4))
    assert [p.max_tokens_k for p in builder_of().build(0, common).parts] == [None, None]
    builder = OstinatoMetadataBuilder(spec_of("fp8"), [], config_of(CPU), CPU)
    common.seq_lens_cpu_upper_bound = torch.tensor([4, 9, 4, 3], dtype=torch.int32)
    assert [p.max_tokens_k for p in builder.build(0, common).parts] == [None, 8]
    common.seq_lens_cpu_upper_bound = None
    assert [p.max_tokens_k for p in builder.build(0, common).parts] == [None, 32]


def test_prompts_over_8_bits_may_have_grown_by_drafts() -> None:
    config = config_of(CPU)
    config.speculative_config = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
    builder = OstinatoMetadataBuilder(spec_of("fp8"), [], config, CPU)
    common = common_of([4, 5], [4, 5], table_of(2))
    common.seq_lens_cpu_upper_bound = torch.tensor([3, 5], dtype=torch.int32)
    assert [p.max_tokens_k for p in builder.build(0, common).parts] == [16]


def test_lengths_of_virtual_batches_are_numbers_of_python() -> None:
    """Attention in chunks has one of numpy, and more sequences than the scheduler."""
    builder, common = builder_of(), common_of([4, 2], [4, 9], table_of(2))
    common.max_query_len = np.int32(4)
    assert type(builder.build(0, common).parts[0].max_seqlen_q) is int
    first = builder.build(0, common).workspace
    many = common_of([2] * 9, [2] * 9, table_of(9))
    assert builder.build(0, many).workspace is not first


def test_offsets_on_their_way_to_the_host_are_not_read() -> None:
    common = common_of([1, 1, 1], [4, 9, 2], table_of(3))
    common.query_start_loc_cpu = torch.full((4,), 77, dtype=torch.int32)
    assert spans(builder_of().build(0, common)) == [(0, 3, 3, 1, True)]


def test_verified_drafts_are_decodes_of_several_rows() -> None:
    builder = builder_of(speculative=2)
    assert spans(builder.build(0, common_of([3, 3], [7, 9], table_of(2)))) == [(0, 6, 2, 3, True)]
    common = common_of([3, 3, 0], [7, 9, 0], table_of(3), tokens=9)
    assert spans(builder.build(0, common)) == [(0, 9, 3, 3, True)]
    common = common_of([3, 3, 8], [7, 9, 8], table_of(3))
    assert spans(builder.build(0, common)) == [(0, 6, 2, 3, True), (6, 14, 1, 8, False)]


def test_graphs_are_captured_of_uniform_batches() -> None:
    support = OstinatoMetadataBuilder.get_cudagraph_support(config_of(CPU), spec_of("auto"))
    assert support is AttentionCGSupport.UNIFORM_BATCH


def test_a_mask_of_each_sequence_is_refused() -> None:
    common = common_of([1], [4], table_of(1), causal=torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="causal: got a tensor, expected one bool"):
        builder_of().build(0, common)


def test_workspace_stays_and_follows_a_wider_table() -> None:
    builder = builder_of()
    first = builder.build(0, common_of([1], [4], table_of(1))).workspace
    assert builder.build(0, common_of([1, 1], [4, 2], table_of(2))).workspace is first
    wider = torch.zeros(1, 9, dtype=torch.int32)
    assert builder.build(0, common_of([1], [4], wider)).workspace is not first
    assert builder._workspaces[0] is first


@pytest.mark.parametrize("kv_cache_dtype", CACHES)
def test_all_that_a_step_launches_is_compiled_before(kv_cache_dtype: str) -> None:
    kernels = OstinatoMetadataBuilder(spec_of(kv_cache_dtype), [], config_of(CPU), CPU)._kernels()
    stored = {"auto": "bf16", "int8_per_token_head": "int8"}.get(kv_cache_dtype, "e4m3")
    assert [k.cache_dtype for k in kernels if isinstance(k, AppendKV)] == [stored]
    assert [k.kv_dtype for k in kernels if isinstance(k, DequantizeKV)] == (
        [] if stored == "bf16" else [stored]
    )
    assert {k.dtype for k in kernels if isinstance(k, AttentionPrefill)} == {"bf16"}
    decodes = [k for k in kernels if isinstance(k, AttentionDecode)]
    assert {k.kv_dtype for k in decodes} == {stored}
    assert {k.columns for k in decodes} == {8, 16, 32, 64}
