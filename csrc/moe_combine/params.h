// The arguments of the sum over a token's experts. Strides count elements, pointers are device
// pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// total[t] = sum_j weights[t][j] y[t][j] + sigmoid(shared_gate[t]) shared[t] + residual[t]
struct MoeCombineParams {
  OSTINATO_FIELDS_BEGIN(MoeCombineParams);
  OSTINATO_FIELD(const void*, y);  // [tokens, top_k, dim]
  OSTINATO_FIELD(int64_t, y_token_stride);
  OSTINATO_FIELD(int64_t, y_slot_stride);
  OSTINATO_FIELD(const int32_t*, ids);     // [tokens, top_k]; -1: y has nothing
  OSTINATO_FIELD(const float*, weights);   // [tokens, top_k]
  OSTINATO_OPTIONAL(const void*, shared);  // [tokens, dim], or null
  OSTINATO_OPTIONAL(int64_t, shared_stride);
  OSTINATO_OPTIONAL(const void*, shared_gate);  // [tokens] of y's dtype or fp32, or null: all 1
  OSTINATO_OPTIONAL(int64_t, shared_gate_stride);
  OSTINATO_OPTIONAL(int32_t, shared_gate_fp32);
  OSTINATO_OPTIONAL(const void*, residual);  // [tokens, dim], or null
  OSTINATO_OPTIONAL(int64_t, residual_stride);
  OSTINATO_FIELD(void*, total);  // [tokens, dim]
  OSTINATO_FIELD(int64_t, total_stride);
  OSTINATO_FIELD(int32_t, tokens);
  OSTINATO_FIELD(int32_t, top_k);
  OSTINATO_FIELD(int32_t, dim);
  OSTINATO_OPTIONAL(int32_t, pdl);  // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
