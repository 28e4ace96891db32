// Reductions of the quantisation kernels over the threads that share a row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/debug.cuh"
#include "common/quantize_math.cuh"

namespace ostinato {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// The largest of non-negative numbers: they are ordered like their bits, with NaN above all.
__device__ __forceinline__ float warp_max(float x) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

// max_magnitude of the numbers of kLanes adjacent lanes, returned to each.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = max_magnitude(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// The threads that share a row.
enum class Share { warp, cta, cluster };

inline constexpr int kMaxWarps = 32;

// The maximum over the threads of a row (a warp, a CTA or a cluster), returned to every thread.
template <bool kWarpPerRow>
__device__ __forceinline__ float row_max(float x, float (&partials)[kMaxWarps]) {
  x = warp_max(x);
  if constexpr (!kWarpPerRow) {
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    OSTINATO_DELAY(quantize_maximum_store, warp == blockDim.x / 32 - 1);
    if (lane == 0) {
      partials[warp] = x;
    }
    __syncthreads();
    OSTINATO_DELAY(quantize_maximum_load, warp == 0);
    x = warp_max(lane < blockDim.x / 32 ? partials[lane] : 0.0f);
  }
  return x;
}

// The sums of kVectors numbers over the lanes of a warp, computed together: at each of the first
// distances, half of the numbers move to the other lane, so that lane l ends with number l / (32 /
// kVectors). The pairs that are added are those of a butterfly sum of each number.
template <int kVectors>
__device__ __forceinline__ float warp_sums(float (&sums)[kVectors]) {
  static_assert((kVectors & (kVectors - 1)) == 0 && kVectors <= 32, "numbers are handed in halves");
  const uint32_t lane = threadIdx.x % 32;
  int distance = 16;
#pragma unroll
  for (int half = kVectors / 2; half > 0; half /= 2, distance /= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int v = 0; v < half; ++v) {
      const float kept = upper ? sums[v + half] : sums[v];
      const float handed = upper ? sums[v] : sums[v + half];
      sums[v] = kept + __shfl_xor_sync(0xffffffffu, handed, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) {
    sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], distance);
  }
  return sums[0];
}

// The sum over a row of one non-negative number per vector, returned to every thread. Thread t of T
// has the vectors t, t + T, t + 2T, ... The order of additions follows from a vector's index in the
// row alone, not from T or the number of vectors per thread: first over 32 adjacent vectors, then
// over every 32nd of these sums, then over the remaining 32. (Vectors past the row's end are 0.)
template <int kVectors>
__device__ __forceinline__ float warp_row_sum(float (&sums)[kVectors]) {
  float sum = warp_sums(sums);
#pragma unroll
  for (int distance = 16; distance >= 32 / kVectors; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  return sum;
}

// The second half of that sum for a row that a CTA shares: `sum` is the result of warp_sums.
template <int kVectors, int kPartials>
__device__ __forceinline__ float cta_row_sum(float sum, float (&partials)[kPartials]) {
  constexpr int kLanesPerSum = 32 / kVectors;
  const uint32_t warps = blockDim.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  OSTINATO_DELAY(quantize_sum_store, threadIdx.x / 32 == warps - 1);
  if (lane % kLanesPerSum == 0) {
    partials[lane / kLanesPerSum * warps + threadIdx.x / 32] = sum;
  }
  __syncthreads();
  OSTINATO_DELAY(quantize_sum_load, threadIdx.x / 32 == 0);
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPartials / 32; ++i) {
    const uint32_t partial = 32 * i + lane;
    sum += partial < kVectors * warps ? partials[partial] : 0.0f;
  }
  return warp_sum(sum);
}

}  // namespace ostinato
