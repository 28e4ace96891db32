// Arguments of append_kv, in plain C++ without CUDA or torch headers. Strides count elements, sizes
// are logical, pointers are device pointers.
#pragma once

#include "attention/common/params.h"
#include "common/fields.h"

namespace ostinato {

// New q, k and v -> q_out and the slots of a paged cache.
struct AppendKVParams {
  OSTINATO_FIELDS_BEGIN(AppendKVParams);
  OSTINATO_OPTIONAL(Heads, q);  // null, with heads_q = 0: none
  OSTINATO_OPTIONAL(Heads, q_out);
  OSTINATO_FIELD(Heads, k);
  OSTINATO_FIELD(Heads, v);
  OSTINATO_FIELD(Slots, k_cache);  // [pages, page_size, heads_kv, dim]
  OSTINATO_FIELD(Slots, v_cache);
  // Fp32 scales of an 8-bit cache. Unless per token, only head_stride is used: 0 or 1.
  OSTINATO_OPTIONAL(Slots, k_scale);
  OSTINATO_OPTIONAL(Slots, v_scale);
  OSTINATO_OPTIONAL(int32_t, k_scale_per_token);  // 1: [pages, page_size, heads_kv], written
  OSTINATO_OPTIONAL(int32_t, v_scale_per_token);
  // [pages, page_size, heads_kv], written: the fixed scale, or NaN for an INT8 head with a NaN.
  OSTINATO_OPTIONAL(Slots, k_scale_out);
  OSTINATO_OPTIONAL(Slots, v_scale_out);
  OSTINATO_FIELD(const int64_t*, slot_mapping);  // [tokens], negative: not written
  OSTINATO_OPTIONAL(const int32_t*, positions);  // [tokens], rows of cos_sin
  // [positions, rotary_dim] cosines, then sines; null: not rotated
  OSTINATO_OPTIONAL(const float*, cos_sin);
  OSTINATO_OPTIONAL(int64_t, cos_sin_stride);
  OSTINATO_OPTIONAL(const void*, q_norm_weight);  // [dim], or null
  OSTINATO_OPTIONAL(const void*, k_norm_weight);
  OSTINATO_OPTIONAL(int32_t, q_norm_is_fp32);  // 0: of the dtype of q
  OSTINATO_OPTIONAL(int32_t, k_norm_is_fp32);
  OSTINATO_OPTIONAL(float, norm_eps);
  OSTINATO_FIELD(int32_t, tokens);
  OSTINATO_OPTIONAL(int32_t, heads_q);
  OSTINATO_FIELD(int32_t, heads_kv);
  OSTINATO_FIELD(int32_t, dim);
  OSTINATO_OPTIONAL(int32_t, rotary_dim);
  OSTINATO_FIELD(int32_t, page_size);
  OSTINATO_OPTIONAL(int32_t, interleaved);  // 1: pairs (2i, 2i + 1), 0: (i, i + rotary_dim / 2)
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_OPTIONAL(int32_t, norm_after_rotation);  // 1: heads are rotated first
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
