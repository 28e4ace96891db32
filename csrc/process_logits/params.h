// Arguments of processing logits, in plain C++ without CUDA or torch headers. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Logits -> logits to sample from, by what each request asks for
// (csrc/process_logits/process_logits.cu). Tables have a row per slot, dense.
struct ProcessLogitsParams {
  OSTINATO_FIELDS_BEGIN(ProcessLogitsParams);
  OSTINATO_FIELD(const float*, logits);  // [rows, vocabulary]
  OSTINATO_FIELD(int64_t, logits_stride);
  OSTINATO_FIELD(const int64_t*, slots);             // [rows], rows of the tables
  OSTINATO_FIELD(const int64_t*, counters);          // [rows], tokens generated so far
  OSTINATO_FIELD(const int64_t*, tokens);            // [rows], the last of them
  OSTINATO_FIELD(const float*, repetition_penalty);  // [rows]
  OSTINATO_FIELD(const uint8_t*, seen);              // [slots, vocabulary], 0 or 1
  OSTINATO_FIELD(int64_t, seen_stride);
  OSTINATO_FIELD(const float*, frequency);    // [slots]
  OSTINATO_FIELD(const float*, presence);     // [slots]
  OSTINATO_FIELD(int32_t*, history);          // [slots, history_size], generated tokens
  OSTINATO_FIELD(const int32_t*, edits);      // [slots], how many edits there are
  OSTINATO_FIELD(const int32_t*, edit_ids);   // [slots, most_edits]
  OSTINATO_FIELD(const float*, edit_values);  // likewise, added to a token's logit
  OSTINATO_FIELD(const int64_t*, edit_ends);  // likewise: only while counters are below
  OSTINATO_FIELD(const int32_t*, masked);     // [slots], whether the mask counts
  OSTINATO_FIELD(const uint32_t*, mask);      // [slots, mask_words], a bit for each allowed token
  OSTINATO_FIELD(float*, out);                // [rows, vocabulary]
  OSTINATO_FIELD(int64_t, out_stride);
  OSTINATO_FIELD(int32_t, history_size);
  OSTINATO_FIELD(int32_t, most_edits);
  OSTINATO_FIELD(int32_t, mask_words);
  OSTINATO_FIELD(int32_t, rows);
  OSTINATO_FIELD(int32_t, vocabulary);
  OSTINATO_OPTIONAL(int32_t, pdl);
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
