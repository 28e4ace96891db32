// The mask of prefill: which keys a query attends to, by causality, window and sequence length.
// score_fragment.cuh applies it to scores; work_tile.cuh derives from it which tiles need it.
#pragma once

#include <cstdint>

namespace ostinato::prefill {

// Causal and window mask, for queries at given positions of a sequence.
struct Mask {
  int left, right;  // -1: no limit
  int seqlen;

  __device__ __forceinline__ int first(int position) const {
    return left < 0 ? 0 : min(max(position - left, 0), seqlen);
  }
  __device__ __forceinline__ int stop(int position) const {
    return right < 0 ? seqlen : min(max(position + right + 1, 0), seqlen);
  }
};

// The keys visible to each of the thread's two rows.
struct VisibleKeys {
  int first[2];
  uint32_t count[2];

  __device__ __forceinline__ bool contains(int half, int key) const {
    return static_cast<uint32_t>(key - first[half]) < count[half];
  }
};

}  // namespace ostinato::prefill
