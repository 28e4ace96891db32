// Conversion of floats to e4m3 and back without the instructions of sm_89.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ostinato {

// The same code as cvt.rn.satfinite.e4m3x2.f32: round to nearest, ties to even. Magnitudes above
// 448, including infinities, become 448; NaN becomes 0x7f.
__device__ __forceinline__ uint32_t round_to_e4m3(float x) {
  constexpr uint32_t kInfinity = 0x7f800000u, kLargestCode = 0x7e, kNaN = 0x7f;
  constexpr uint32_t kLeastNormal = 0x3c800000u;  // 2^-6
  const uint32_t bits = __float_as_uint(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kInfinity) {
    return kNaN;
  }
  uint32_t code;
  if (magnitude < kLeastNormal) {
    // Multiples of 2^-9, the spacing of fp32 numbers from 2^14 on.
    code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) & 0xfu;
  } else {
    constexpr uint32_t kDropped = 20;                // bits of the mantissa
    constexpr uint32_t kExponents = (127 - 7) << 3;  // difference of the exponent biases
    const uint32_t odd = magnitude >> kDropped & 1;
    code = ((magnitude + (1u << (kDropped - 1)) - 1 + odd) >> kDropped) - kExponents;
  }
  return (bits >> 24 & 0x80u) | (code < kLargestCode ? code : kLargestCode);
}

// The number of a code, exactly.
__device__ __forceinline__ float e4m3_to_float(uint32_t code) {
  constexpr uint32_t kNaN = 0x7f, kSign = 0x80;
  // The code's bits as those of an fp32 number, whose exponent bias is 120 greater.
  const float magnitude = __uint_as_float((code & kNaN) << 20) * 0x1p120f;
  const float number = (code & kNaN) == kNaN ? __uint_as_float(0x7fffffffu) : magnitude;
  return (code & kSign) != 0 ? -number : number;
}

}  // namespace ostinato
