// The arguments of merging attention states, as a plain struct shared by the kernel and the loader
// (csrc/bindings/module.cpp). Plain C++: no CUDA and no torch header, so that the host compiler
// builds the loader alone. Strides count elements, sizes are logical, pointers are device pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// Outputs of attention: [tokens, heads, dim], the elements of a head adjacent.
struct MergeOutputs {
  void* data;
  int64_t stride;  // from token to token
  int64_t head_stride;
};

// Their LSE: [tokens, heads].
struct MergeLse {
  float* data;
  int64_t stride;
  int64_t head_stride;
};

// Two states of attention to different keys -> that of attention to all
// (csrc/attention/merge/merge_states.cu).
struct MergeStatesParams {
  MergeOutputs o_a, o_b, out;  // out may be o_a or o_b
  MergeLse lse_a, lse_b, out_lse;
  int32_t tokens, heads, dim;
  int32_t pdl;
};

}  // namespace ostinato
