// Arguments of the dequantisation of keys and values, in plain C++ without CUDA or torch headers.
// Strides count elements, sizes are logical, pointers are device pointers.
#pragma once

#include "attention/common/params.h"
#include "common/fields.h"

namespace ostinato {

struct DequantizeKvParams {
  OSTINATO_FIELDS_BEGIN(DequantizeKvParams);
  // 8-bit [pages, page_size, heads, dim], the last dimension contiguous; v has value_dim instead of
  // dim. Without a page table packed [tokens, heads, dim]: one page.
  OSTINATO_FIELD(Slots, k);
  OSTINATO_FIELD(Slots, v);
  // Fp32 factors like k and v without their last dimension; strides of 0 where many share one.
  OSTINATO_FIELD(Slots, k_scale);
  OSTINATO_FIELD(Slots, v_scale);
  // 16-bit [tokens, heads, dim] and [tokens, heads, value_dim], contiguous: the tokens of the
  // sequences that have queries, one sequence after the other.
  OSTINATO_FIELD(void*, k_out);
  OSTINATO_FIELD(void*, v_out);
  OSTINATO_FIELD(int32_t, tokens);  // that there is room for; packed: that there are
  OSTINATO_FIELD(int32_t, heads);
  OSTINATO_FIELD(int32_t, dim);  // multiples of 16
  OSTINATO_FIELD(int32_t, value_dim);
  OSTINATO_OPTIONAL(const int32_t*, page_table);  // [batch, max_pages]; null: packed
  // The others are given with a page table.
  OSTINATO_OPTIONAL(int64_t, page_table_stride);
  OSTINATO_OPTIONAL(const int32_t*, seq_lens);  // [batch], clamped to 0 .. max_pages * page_size
  // [batch + 1]; null: max_seqlen_q queries of each sequence
  OSTINATO_OPTIONAL(const int32_t*, cu_seqlens_q);
  // [batch + 1], written: where sequences begin in k_out
  OSTINATO_OPTIONAL(int32_t*, cu_seqlens_k);
  OSTINATO_OPTIONAL(int32_t, batch);
  OSTINATO_OPTIONAL(int32_t, page_size);
  OSTINATO_OPTIONAL(int32_t, max_pages);
  OSTINATO_OPTIONAL(int32_t, max_seqlen_q);
  // Tokens that no query of their sequence sees, by a window of so many before it, are left out;
  // -1: no window.
  OSTINATO_OPTIONAL(int32_t, left);
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
