// The arguments of sampling, as plain structs shared by the kernels and the loader
// (csrc/bindings/module.cpp). Plain C++: no CUDA and no torch header, so that the host compiler
// builds the loader alone. Strides count elements, sizes are logical, pointers are device pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// Logits -> one token for each row (csrc/sampling/sample.cu).
struct SampleParams {
  const void* logits;  // [rows, vocabulary], rows contiguous
  int64_t logits_stride;
  const float* temperature;  // [rows]; 0 and NaN are greedy
  const void* top_k;         // [rows] int32 or int64; 0 keeps all
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* counters;
  const float* repetition_penalty;  // [rows], or null with seen
  const uint8_t* seen;              // [.., vocabulary], 0 or 1
  int64_t seen_stride;
  const int64_t* seen_rows;  // [rows], rows of seen; null: row i has row i
  // [rows, parts], the places (common/argmax_key.cuh) of the best of each part of a row, or null.
  // With them the logits of greedy rows without a penalty are not read.
  const uint64_t* best;
  int64_t best_stride;
  int64_t* out;  // [rows]
  int32_t parts;
  int32_t rows, vocabulary;
  int32_t top_k_is_int64;  // 0: int32
  int32_t pdl;
};

}  // namespace ostinato
