// Arguments of prefill attention, in plain C++ without CUDA or torch headers. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "attention/common/params.h"
#include "common/fields.h"

namespace ostinato {

// Attention of many queries per sequence (csrc/attention/prefill/prefill_sm90.cu). Keys and values
// are packed or in a paged cache; each library is compiled for one of the two.
struct PrefillParams {
  OSTINATO_FIELDS_BEGIN(PrefillParams);
  OSTINATO_FIELD(Heads, q);  // [tokens_q, heads_q, dim]
  // Packed [tokens_k, heads_kv, dim] with one slot per token and no pages, or [pages, page_size,
  // heads_kv, dim] in any order, dim contiguous; v has value_dim instead of dim.
  OSTINATO_FIELD(Slots, k);
  OSTINATO_FIELD(Slots, v);
  // [batch + 1]; null: max_seqlen_q rows of q for each sequence
  OSTINATO_OPTIONAL(const int32_t*, cu_seqlens_q);
  OSTINATO_OPTIONAL(const int32_t*, cu_seqlens_k);  // [batch + 1], packed only
  // [batch], paged only; clamped to 0 .. max_pages * page_size
  OSTINATO_OPTIONAL(const int32_t*, seq_lens);
  OSTINATO_OPTIONAL(const int32_t*, page_table);  // [batch, max_pages], paged only
  OSTINATO_OPTIONAL(int64_t, page_table_stride);
  OSTINATO_OPTIONAL(const float*, sinks);  // [heads_q], or null
  OSTINATO_FIELD(Heads, out);              // [tokens_q, heads_q, value_dim]
  OSTINATO_OPTIONAL(Heads, lse);           // fp32 [tokens_q, heads_q], or null
  // ostinato_workspace_bytes() bytes, zero before the first launch. May be null if that is 8 bytes:
  // CTAs then take work tiles round-robin.
  OSTINATO_OPTIONAL(void*, workspace);
  OSTINATO_FIELD(int32_t, batch);
  OSTINATO_FIELD(int32_t, heads_q);
  OSTINATO_FIELD(int32_t, heads_kv);
  OSTINATO_FIELD(int32_t, tokens_q);
  OSTINATO_OPTIONAL(int32_t, tokens_k);
  OSTINATO_OPTIONAL(int32_t, pages);
  OSTINATO_OPTIONAL(int32_t, page_size);
  OSTINATO_OPTIONAL(int32_t, max_pages);
  OSTINATO_FIELD(int32_t, max_seqlen_q);
  OSTINATO_OPTIONAL(int32_t, max_seqlen_k);
  OSTINATO_FIELD(int32_t, left);
  OSTINATO_FIELD(int32_t, right);  // sliding window; -1: no limit. Causal: right = 0
  OSTINATO_FIELD(float, scale);
  OSTINATO_OPTIONAL(float, softcap);  // 0: none
  // Sequences with fewer rows (queries times query heads of a KV head) are skipped.
  OSTINATO_OPTIONAL(int32_t, least_rows);
  // Query heads of a KV head that share tiles, a divisor of the group; 0: chosen by the kernel.
  OSTINATO_OPTIONAL(int32_t, pack);
  OSTINATO_OPTIONAL(int32_t, pdl);
  // Fp32 scales of 8-bit q, k and v, otherwise null: one (stride 0), or one per KV head (stride 1).
  OSTINATO_OPTIONAL(const float*, q_scale);
  OSTINATO_OPTIONAL(const float*, k_scale);
  OSTINATO_OPTIONAL(const float*, v_scale);
  OSTINATO_OPTIONAL(int32_t, q_scale_stride);
  OSTINATO_OPTIONAL(int32_t, k_scale_stride);
  OSTINATO_OPTIONAL(int32_t, v_scale_stride);
  OSTINATO_FIELDS_END();
};

// Upper bounds of a launch for its workspace, which depends on the device alone.
struct PrefillCapacities {
  OSTINATO_FIELDS_BEGIN(PrefillCapacities);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
