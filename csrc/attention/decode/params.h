// The arguments of decode attention: plain C++, without a header of CUDA or torch. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "attention/common/params.h"
#include "common/fields.h"

namespace ostinato {

// Attention of a few queries per sequence to a paged KV cache
// (csrc/attention/decode/decode_sm90.cu).
struct PagedDecodeParams {
  OSTINATO_FIELDS_BEGIN(PagedDecodeParams);
  OSTINATO_FIELD(Heads, q);        // [tokens, heads_q, dim]
  OSTINATO_FIELD(Slots, k_cache);  // [pages, page_size, heads_kv, dim] in any order, dim contiguous
  OSTINATO_FIELD(Slots, v_cache);
  // Fp32, of an 8-bit cache, otherwise null; strides 0 where all share one.
  OSTINATO_OPTIONAL(Slots, k_scale);
  OSTINATO_OPTIONAL(Slots, v_scale);
  OSTINATO_FIELD(const int32_t*, page_table);  // [batch, max_pages]
  OSTINATO_FIELD(int64_t, page_table_stride);
  OSTINATO_FIELD(const int32_t*, seq_lens);  // [batch]; clamped to 0 .. max_pages * page_size
  // [batch + 1]; null: max_seqlen_q rows of q for each sequence
  OSTINATO_OPTIONAL(const int32_t*, cu_seqlens_q);
  OSTINATO_OPTIONAL(const float*, sinks);  // [heads_q], or null
  OSTINATO_FIELD(Heads, out);              // [tokens, heads_q, dim]
  OSTINATO_OPTIONAL(Heads, lse);           // fp32 [tokens, heads_q], or null
  // Ostinato_workspace_bytes() bytes; zero before its first launch.
  OSTINATO_FIELD(void*, workspace);
  OSTINATO_FIELD(int32_t, batch);
  OSTINATO_FIELD(int32_t, heads_q);
  OSTINATO_FIELD(int32_t, heads_kv);
  OSTINATO_FIELD(int32_t, pages);
  OSTINATO_FIELD(int32_t, page_size);
  OSTINATO_FIELD(int32_t, max_pages);
  OSTINATO_FIELD(int32_t, max_seqlen_q);
  OSTINATO_FIELD(int32_t, left);
  OSTINATO_FIELD(int32_t, right);  // the window; -1: no limit. Causal: right = 0
  OSTINATO_FIELD(float, scale);
  OSTINATO_OPTIONAL(float, softcap);  // 0: none
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_OPTIONAL(L2Partition, l2_partition);
  OSTINATO_FIELDS_END();
};

// What bounds the workspace of a launch.
struct DecodeCapacities {
  OSTINATO_FIELDS_BEGIN(DecodeCapacities);
  OSTINATO_FIELD(int32_t, rows);       // queries of a sequence times query heads of a KV head
  OSTINATO_FIELD(int64_t, sequences);  // times KV heads
  OSTINATO_FIELD(int64_t, tokens);     // of a sequence: max_pages * page_size
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
