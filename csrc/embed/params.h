// The arguments of the embedding, as a plain struct shared by the kernel and the loader
// (csrc/bindings/module.cpp). Plain C++: no CUDA and no torch header, so that the host compiler
// builds the loader alone. Strides count elements, sizes are logical, pointers are device pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// Rows of a table, and a mark for each in the set of tokens that were seen (csrc/embed/embed.cu).
struct EmbedParams {
  const int64_t* tokens;  // [rows]; one out of range is taken for the last, as those of seen_rows
  const void* table;      // [vocabulary, dim]
  int64_t table_stride;
  uint8_t* seen;  // [seen_size, vocabulary], of which 1 is written, or null
  int64_t seen_stride;
  const int64_t* seen_rows;  // [rows], with seen
  const int32_t* n_active;  // one element, or null: rows from here on are padding, left as they are
  void* out;                // [rows, dim]
  int64_t out_stride;
  int32_t rows, vocabulary, dim;
  int32_t seen_size;
  int32_t pdl;  // 1: launched with programmatic stream serialization
};

}  // namespace ostinato
