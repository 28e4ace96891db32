// Operands of the small-M GEMM besides the weights: bytes of x, and scale, bias and sum of a weight
// row.
#pragma once

#include <cstdint>

#include "config.cuh"
#include "gemm_w8a8/params.h"

namespace ostinato::small_m {

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
