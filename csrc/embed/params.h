// The arguments of the embedding: plain C++, without a header of CUDA or torch. Strides count
// elements, sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Rows of a table, and a mark for each in the set of tokens that were seen (csrc/embed/embed.cu).
struct EmbedParams {
  OSTINATO_FIELDS_BEGIN(EmbedParams);
  // [rows]; one out of range is taken for the last, as those of seen_rows
  OSTINATO_FIELD(const int64_t*, tokens);
  OSTINATO_FIELD(const void*, table);  // [vocabulary, dim]
  OSTINATO_FIELD(int64_t, table_stride);
  OSTINATO_OPTIONAL(uint8_t*, seen);  // [seen_size, vocabulary], of which 1 is written, or null
  OSTINATO_OPTIONAL(int64_t, seen_stride);
  OSTINATO_OPTIONAL(const int64_t*, seen_rows);  // [rows], with seen
  // One element, or null: rows from here on are padding, left as they are.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  OSTINATO_FIELD(void*, out);  // [rows, dim]
  OSTINATO_FIELD(int64_t, out_stride);
  OSTINATO_FIELD(int32_t, rows);
  OSTINATO_FIELD(int32_t, vocabulary);
  OSTINATO_FIELD(int32_t, dim);
  OSTINATO_OPTIONAL(int32_t, seen_size);
  OSTINATO_OPTIONAL(int32_t, pdl);  // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
