// Operands of the small-M GEMM: fragments of weights, bytes of x, scale, bias and sum of a weight
// row; and the sums that its warps have left of one.
#pragma once

#include <cstdint>

#include "config.cuh"
#include "gemm_w8a8/params.h"

namespace ostinato::small_m {

// This lane's weights of a tile in a block of K, from its place in the block.
__device__ __forceinline__ WeightFragment load_weights(const uint8_t* block) {
  const uint4* fragment = reinterpret_cast<const uint4*>(block);
  return {fragment[0], fragment[kPackedBlockBytes / 32]};
}

// Where in a block this lane has its weights: row lane / 4, vector lane % 4, with the swizzle.
__device__ __forceinline__ int place_in_block(int lane) {
  const int row = lane / 4;
  return row * kPackedDepth + (lane % 4 ^ row / 2 % 4) * 16;
}

// The sum over all of K, of what each warp has of its part.
__device__ __forceinline__ int32_t sum_of(const SharedStorage& shared, int token, int row) {
  int32_t sums[kDepthWarps];
#pragma unroll
  for (int warp = 0; warp < kDepthWarps; ++warp) {
    sums[warp] = shared.partial[warp][token][row];
  }
#pragma unroll
  for (int half = kDepthWarps / 2; half > 0; half /= 2) {
#pragma unroll
    for (int warp = 0; warp < half; ++warp) {
      sums[warp] += sums[warp + half];
    }
  }
  return sums[0];
}

// Loads 16 bytes of a row of x from `offset`; zero from `limit` on.
template <bool kVectorLoads>
__device__ __forceinline__ uint4 load_x(const uint8_t* row, int offset, int limit) {
  uint4 x = make_uint4(0, 0, 0, 0);
  if constexpr (kVectorLoads) {  // then 16 divides `limit`
    if (offset < limit) {
      x = *reinterpret_cast<const uint4*>(row + offset);
    }
  } else {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (offset + i < limit) {
        words[i / 4] |= static_cast<uint32_t>(row[offset + i]) << (8 * (i % 4));
      }
    }
    x = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return x;
}

// Scale, bias and sum of one weight row, for the epilogue.
struct Channel {
  Channel() = default;

  float scale;
  Output bias;  // converted at its use: a conversion here would wait for the load
  int32_t sum;

  __device__ Channel(const W8A8GemmParams& params, int n) : scale(0), bias(0.0f), sum(0) {
    if (n < params.n) {
      scale = params.w_scale[static_cast<int64_t>(n) * params.w_scale_stride];
      if (params.bias != nullptr) {
        bias = static_cast<const Output*>(params.bias)[n];
      }
      if (params.x_zero_point != nullptr) {
        sum = params.w_sum[n];
      }
    }
  }
};

}  // namespace ostinato::small_m
