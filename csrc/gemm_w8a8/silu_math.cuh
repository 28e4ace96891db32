// SiLU with one rounding per operation, as torch computes it, at the cost of the fast division.
#pragma once

#include "common/quantize_math.cuh"

namespace ostinato {

// Correctly rounded x / d for finite x and normal d whose inverse is normal: as in Divisor.
__device__ __forceinline__ float divide_regular(float x, float d) {
  const float z = inverse_of(d);
  const float q = __fmul_rn(x, z);
  return __fmaf_rn(__fmaf_rn(q, d, -x), -z, q);
}

// The largest gate, in magnitude, that silu_fast takes.
inline constexpr float kSiluFastLimit = 80.0f;

__device__ __forceinline__ float silu_fast(float gate) {
  return divide_regular(gate, __fadd_rn(1.0f, expf(-gate)));
}

// gate / (1 + exp(-gate)) for all gates.
__device__ __forceinline__ float silu(float gate) {
  const float d = __fadd_rn(1.0f, expf(-gate));
  if (d == 1.0f) {
    return gate;
  }
  if (d == __uint_as_float(0x7f800000)) {
    return __fmul_rn(gate, 0.0f);  // NaN for an infinite gate
  }
  // d may be as large as 2^128: its inverse would be subnormal.
  return __fmul_rn(divide_regular(gate, __fmul_rn(d, 0x1p-64f)), 0x1p-64f);
}

}  // namespace ostinato
