// The arguments of merging attention states: plain C++, without a header of CUDA or torch. Strides
// count elements, sizes are logical, pointers are device pointers.
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

// Two states of attention to different keys -> that of attention to all
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
