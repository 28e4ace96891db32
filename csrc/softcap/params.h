// Arguments of capping logits, in plain C++ without CUDA or torch headers. Strides count elements,
// sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// logits = cap * tanh(logits / cap), in place (csrc/softcap/softcap.cu).
struct SoftcapParams {
  OSTINATO_FIELDS_BEGIN(SoftcapParams);
  OSTINATO_FIELD(void*, logits);  // [rows, vocabulary]
  OSTINATO_FIELD(int64_t, logits_stride);
  OSTINATO_FIELD(float, cap);
  // [rows], or null: greedy rows whose penalty is 1 are left as they are.
  OSTINATO_OPTIONAL(const float*, temperature);
  OSTINATO_OPTIONAL(const float*, repetition_penalty);  // [rows], or null: 1
  // One element, or null: rows from this index on are padding, and are left as they are.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  OSTINATO_FIELD(int32_t, rows);
  OSTINATO_FIELD(int32_t, vocabulary);
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
