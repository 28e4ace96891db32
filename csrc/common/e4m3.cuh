// Rounding of floats to e4m3 without the instruction of sm_89.
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

}  // namespace ostinato
