// Arguments of merge_states, in plain C++ without CUDA or torch headers. Strides count elements,
// sizes are logical, pointers are device pointers.
#pragma once

#include "attention/common/params.h"
#include "common/fields.h"

namespace ostinato {

// The LSE of attention: [tokens, heads].
struct MergeLse {
  float* data;
  int64_t stride;  // from token to token
  int64_t head_stride;
};
constexpr const char* kind_of(const MergeLse*) { return "pqq"; }

// Attention states over different keys -> the state over all of them
// (csrc/attention/merge/merge_states.cu).
struct MergeStatesParams {
  OSTINATO_FIELDS_BEGIN(MergeStatesParams);
  OSTINATO_FIELD(Heads, o_a);
  OSTINATO_FIELD(Heads, o_b);
  OSTINATO_FIELD(Heads, out);  // out may be o_a or o_b
  OSTINATO_FIELD(MergeLse, lse_a);
  OSTINATO_FIELD(MergeLse, lse_b);
  OSTINATO_FIELD(MergeLse, out_lse);
  OSTINATO_FIELD(int32_t, tokens);
  OSTINATO_FIELD(int32_t, heads);
  OSTINATO_FIELD(int32_t, dim);
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
