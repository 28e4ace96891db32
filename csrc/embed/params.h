// Arguments of the embedding, in plain C++ without CUDA or torch headers. Strides count elements,
// sizes are logical, pointers are device pointers.
#pragma once

#include "common/fields.h"

namespace ostinato {

// Copies rows of a table, and marks tokens as seen (csrc/embed/embed.cu). Of a table that several
// ranks divide, one has the rows of the tokens from first_id on: those of others are zeros here.
struct EmbedParams {
  OSTINATO_FIELDS_BEGIN(EmbedParams);
  // [rows]; indices out of range are taken for the last, as those of seen_rows
  OSTINATO_FIELD(const int64_t*, tokens);
  OSTINATO_FIELD(const void*, table);  // [table_rows, dim]
  OSTINATO_FIELD(int64_t, table_stride);
  OSTINATO_OPTIONAL(uint8_t*, seen);  // [seen_size, vocabulary], set to 1, or null
  OSTINATO_OPTIONAL(int64_t, seen_stride);
  OSTINATO_OPTIONAL(const int64_t*, seen_rows);  // [rows], with seen
  // One element, or null: rows from this index on are padding, and are not written.
  OSTINATO_OPTIONAL(const int32_t*, n_active);
  OSTINATO_FIELD(void*, out);  // [rows, dim]
  OSTINATO_FIELD(int64_t, out_stride);
  OSTINATO_FIELD(int32_t, rows);
  OSTINATO_FIELD(int32_t, vocabulary);  // tokens that there are
  OSTINATO_OPTIONAL(int32_t, first_id);
  OSTINATO_FIELD(int32_t, table_rows);
  OSTINATO_FIELD(int32_t, dim);
  OSTINATO_OPTIONAL(int32_t, seen_size);
  OSTINATO_OPTIONAL(int32_t, pdl);  // 1: launched with programmatic stream serialization
  OSTINATO_FIELDS_END();
};

}  // namespace ostinato
