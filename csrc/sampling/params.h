// The arguments of sampling: plain C++, without a header of CUDA or torch. Strides count elements,
// sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Logits -> one token for each row (csrc/sampling/sample.cu).
struct SampleParams {
  OSTINATO_FIELDS_BEGIN(SampleParams);
  OSTINATO_FIELD(const void*, logits);  // [rows, vocabulary], rows contiguous
  OSTINATO_FIELD(int64_t, logits_stride);
  OSTINATO_FIELD(const float*, temperature);  // [rows]; 0 and NaN are greedy
  OSTINATO_FIELD(const void*, top_k);         // [rows] int32 or int64; 0 keeps all
  OSTINATO_FIELD(const float*, top_p);
  OSTINATO_FIELD(const float*, min_p);
  OSTINATO_FIELD(const int64_t*, seeds);
  OSTINATO_FIELD(const int64_t*, counters);
  OSTINATO_OPTIONAL(const float*, repetition_penalty);  // [rows], or null with seen
  OSTINATO_OPTIONAL(const uint8_t*, seen);              // [.., vocabulary], 0 or 1
  OSTINATO_OPTIONAL(int64_t, seen_stride);
  OSTINATO_OPTIONAL(const int64_t*, seen_rows);  // [rows], rows of seen; null: row i has row i
  // [rows, parts], the places (common/argmax_key.cuh) of the best of each part of a row, or null.
  // With them the logits of greedy rows without a penalty are not read.
  OSTINATO_OPTIONAL(const uint64_t*, best);
  OSTINATO_OPTIONAL(int64_t, best_stride);
  OSTINATO_FIELD(int64_t*, out);  // [rows]
  OSTINATO_OPTIONAL(int32_t, parts);
  OSTINATO_FIELD(int32_t, rows);
  OSTINATO_FIELD(int32_t, vocabulary);
  OSTINATO_FIELD(int32_t, top_k_is_int64);  // 0: int32
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
