// A thread's fragment of the scores: which rows and columns it holds.
//
// A thread holds elements of two rows, lane / 4 and lane / 4 + 8 of its warp's 16, and in every 8
// columns the two from 2 (lane % 4) on. Element i: row (i / 2) % 2, column i / 4 * 8 + i % 2.
#pragma once

#include <limits>

#include "attention/common/ptx.cuh"
#include "work_tile.cuh"

namespace ostinato::prefill {

// maximum of an empty set of scores
inline constexpr float kNothing = -std::numeric_limits<float>::max();

__device__ __forceinline__ constexpr int row_of(int i) { return i / 2 % 2; }
__device__ __forceinline__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }
__device__ __forceinline__ int first_column() { return threadIdx.x % 4 * 2; }
// Row among the warpgroup's 64.
__device__ __forceinline__ int row_of_thread(int half) {
  return threadIdx.x % kWarpgroup / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// The logit of a score, times log2(e).
__device__ __forceinline__ float capped_logit(const Arguments& args, float score) {
  return args.params.softcap * (kLog2E * hyperbolic_tangent(score * args.logit_scale));
}
__device__ __forceinline__ float logit_of(const Arguments& args, float score) {
  return args.params.softcap > 0 ? capped_logit(args, score) : score * args.logit_scale;
}

// Sets masked scores to minus infinity; `key` is the key of the first column.
__device__ __forceinline__ void apply_mask(float (&scores)[kScores], int key,
                                           const VisibleKeys& visible) {
  const int column = key + first_column();
  if (__all_sync(0xffffffff, visible.first[0] == 0 && visible.first[1] == 0)) {
    const int stop[2] = {static_cast<int>(visible.count[0]) - column,
                         static_cast<int>(visible.count[1]) - column};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = column_of(i) < stop[row_of(i)] ? scores[i] : -INFINITY;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    scores[i] = visible.contains(row_of(i), column + column_of(i)) ? scores[i] : -INFINITY;
  }
}

}  // namespace ostinato::prefill
