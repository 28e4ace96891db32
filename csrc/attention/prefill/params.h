// The arguments of prefill attention: plain C++, without a header of CUDA or torch. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "attention/common/params.h"
#include "common/fields.h"

namespace ostinato {

// Attention of many queries per sequence (csrc/attention/prefill/prefill_sm90.cu). Keys and values
// lie packed, or in a paged cache; a library is compiled for one of both.
struct PrefillParams {
  OSTINATO_FIELDS_BEGIN(PrefillParams);
  OSTINATO_FIELD(Heads, q);  // [tokens_q, heads_q, dim]
  // Packed [tokens_k, heads_kv, dim], a slot for each token and no page, or
  // [pages, page_size, heads_kv, dim] in any order, dim contiguous; v with value_dim.
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
  // ostinato_workspace_bytes() bytes, zero before its first launch; null, where that is 8 bytes:
  // CTAs do not balance their work.
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
  OSTINATO_FIELD(int32_t, right);  // the window; -1: no limit. Causal: right = 0
  OSTINATO_FIELD(float, scale);
  OSTINATO_OPTIONAL(float, softcap);  // 0: none
  // Sequences with fewer rows (queries times heads of a group) are left out.
  OSTINATO_OPTIONAL(int32_t, least_rows);
  // Heads of a group that share tiles, a divisor of it; 0: the kernel's choice.
  OSTINATO_OPTIONAL(int32_t, pack);
  OSTINATO_OPTIONAL(int32_t, pdl);
  // Of 8-bit q, k and v fp32 factors: of all (stride 0) or of each KV head (stride 1), or null.
  OSTINATO_OPTIONAL(const float*, q_scale);
  OSTINATO_OPTIONAL(const float*, k_scale);
  OSTINATO_OPTIONAL(const float*, v_scale);
  OSTINATO_OPTIONAL(int32_t, q_scale_stride);
  OSTINATO_OPTIONAL(int32_t, k_scale_stride);
  OSTINATO_OPTIONAL(int32_t, v_scale_stride);
  OSTINATO_FIELDS_END();
};

// What bounds the workspace of a launch: the device alone.
struct PrefillCapacities {
  OSTINATO_FIELDS_BEGIN(PrefillCapacities);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
