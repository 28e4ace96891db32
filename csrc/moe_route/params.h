// The arguments of routing. Strides count elements, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// The semantics are those of runtime/ops/moe/route.py.
struct MoeRouteParams {
  OSTINATO_FIELDS_BEGIN(MoeRouteParams);
  OSTINATO_FIELD(const void*, logits);  // [tokens, experts]
  OSTINATO_FIELD(int64_t, logits_stride);
  OSTINATO_OPTIONAL(const float*, correction_bias);  // [experts], or null
  // One element, or null: tokens from this index on are padding.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  OSTINATO_FIELD(int32_t*, ids);      // [tokens, top_k]
  OSTINATO_FIELD(float*, weights);    // [tokens, top_k]
  OSTINATO_FIELD(int32_t*, rows);     // [tokens * top_k]
  OSTINATO_FIELD(int32_t*, offsets);  // [experts + 1]
  OSTINATO_FIELD(int32_t*, tiles);    // [capacity, 4], 16-byte aligned
  OSTINATO_FIELD(int32_t*, n_tiles);  // [1]
  // Tokens are divided into so many segments, each but the last of as many. Of one, which has at
  // most 32 tokens, counts is null; of several it is scratch for their slots of each expert,
  // uint16 [segments, experts, rounded up to even], 4-byte aligned: a segment has at most 65535
  // tokens. 2, 4 or 8 segments of at most 16 tokens take one launch where there are clusters.
  OSTINATO_FIELD(int32_t, segments);
  OSTINATO_OPTIONAL(uint16_t*, counts);
  OSTINATO_FIELD(int32_t, tokens);
  OSTINATO_FIELD(int32_t, experts);
  OSTINATO_FIELD(int32_t, top_k);
  OSTINATO_FIELD(int32_t, tile_tokens);
  OSTINATO_FIELD(int32_t, sigmoid);  // 0: softmax
  OSTINATO_FIELD(int32_t, renormalize);
  OSTINATO_FIELD(float, routed_scale);
  OSTINATO_FIELD(int32_t, groups);
  OSTINATO_FIELD(int32_t, top_groups);
  OSTINATO_FIELD(int32_t, top2);    // a group's worth: 1, the sum of its two best, or its best
  OSTINATO_OPTIONAL(int32_t, pdl);  // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
