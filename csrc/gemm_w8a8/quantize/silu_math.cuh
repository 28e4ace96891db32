// SiLU with one rounding per operation, as torch computes it, at the cost of the fast division.
#pragma once

#include "common/quantize_math.cuh"

namespace ostinato {

// x / d for finite x and normal d, where z is the normal inverse of d.
__device__ __forceinline__ float divide_by(float x, float d, float z) {
  const float q = __fmul_rn(x, z);
  return __fmaf_rn(__fmaf_rn(q, d, -x), -z, q);
}

// Correctly rounded division, as in Divisor.
__device__ __forceinline__ float divide_regular(float x, float d) {
  return divide_by(x, d, inverse_of(d));
}

// The largest magnitude of a gate that silu_fast accepts.
inline constexpr float kSiluFastLimit = 80.0f;

// 1 + exp(-gate) with the bits of 1 + expf(-gate), for gates that silu_fast accepts: expf's last
// product, by a power of two, is exact there, so it can be fused into the addition.
__device__ __forceinline__ float one_and_exp(float gate) {
  constexpr float kLog2E = 0x1.715476p+0f, kRest = 0x1.4ae0cp-26f;  // log2(e) in two parts
  // The integer part of -gate * log2(e) follows from the same rounding as in expf: near an integer,
  // any other way could yield the neighbouring integer.
  constexpr float kRange = 252.0f, kShift = 12582913.0f, kBias = 126.0f;
  const float in_range = __saturatef(__fmaf_rn(-gate, 0x1.77313ap-8f, 0.5f));
  const float shifted = __fmaf_rd(in_range, kRange, kShift);
  const float whole = __fadd_rn(shifted, -(kShift + kBias));
  const float part = __fmaf_rn(-gate, kRest, __fmaf_rn(-gate, kLog2E, -whole));
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(part));
  return __fmaf_rn(__uint_as_float(__float_as_uint(shifted) << 23), power, 1.0f);
}

// The inverse need not be correctly rounded: the quotient is, for each of the fp32 gates within the
// limit (tests/kernels/gemm/silu.cu).
__device__ __forceinline__ float silu_fast(float gate) {
  const float d = one_and_exp(gate);
  return divide_by(gate, d, approximate_inverse_of(d));
}

// x / (1 + exp(-exponent)) for all x and exponents of the same sign.
__device__ __forceinline__ float over_one_and_exp(float x, float exponent) {
  const float d = __fadd_rn(1.0f, expf(-exponent));
  if (d == 1.0f) {
    return x;
  }
  if (d == __uint_as_float(0x7f800000)) {
    return __fmul_rn(x, 0.0f);  // NaN for infinite x
  }
  // d may be as large as 2^128: its inverse would be subnormal.
  return __fmul_rn(divide_regular(x, __fmul_rn(d, 0x1p-64f)), 0x1p-64f);
}

// gate / (1 + exp(-gate)) for all gates.
__device__ __forceinline__ float silu(float gate) { return over_one_and_exp(gate, gate); }

}  // namespace ostinato
