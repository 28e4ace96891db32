// Arguments of log-probabilities, in plain C++ without CUDA or torch headers. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Logits -> log-probabilities of one token a row and of its best tokens
// (csrc/token_logprobs/token_logprobs.cu).
struct TokenLogprobsParams {
  OSTINATO_FIELDS_BEGIN(TokenLogprobsParams);
  OSTINATO_FIELD(const float*, logits);  // [rows, vocabulary]
  OSTINATO_FIELD(int64_t, logits_stride);
  OSTINATO_FIELD(const int64_t*, tokens);  // [rows]; -1 is none
  OSTINATO_FIELD(const int32_t*, wanted);  // [slots], how many of the best; -1: nothing at all
  OSTINATO_FIELD(const int64_t*, slots);   // [rows]
  OSTINATO_FIELD(float*, logprobs);        // [rows, 1 + most], dense
  OSTINATO_FIELD(int32_t*, ids);           // [rows, most], dense
  OSTINATO_FIELD(int32_t, most);
  OSTINATO_FIELD(int32_t, rows);
  OSTINATO_FIELD(int32_t, vocabulary);
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
