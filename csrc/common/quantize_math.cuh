// The arithmetic of quantisation, bit-exact with runtime/ops/linear/quantize.py, in few
// instructions: at full memory bandwidth there is time for about 20 to 35 per element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <limits>

#include "e4m3.cuh"
#include "target.cuh"

namespace ostinato {

namespace dtype {
using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;
struct int8 {
  // Of dynamic scales; static ones use -128, too.
  static constexpr float kGridMax = 127.0f;
};
struct e4m3 {
  static constexpr float kGridMax = 448.0f;
};
}  // namespace dtype

// max(a, |b|); NaN if either is NaN.
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(fabsf(b)));
  return y;
}

// min(max(x, low), high); NaN if x is NaN.
__device__ __forceinline__ float clamp(float x, float low, float high) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(low));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(high));
  return y;
}

__device__ __forceinline__ float approximate_inverse_of(float d) {
  float z;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(d));
  return z;
}

// Correctly rounded 1 / d for normal d with a normal inverse: one Newton step is enough (the
// compiler's own sequence).
__device__ __forceinline__ float inverse_of(float d) {
  const float z = approximate_inverse_of(d);
  return __fmaf_rn(z, __fmaf_rn(-d, z, 1.0f), z);
}

// A divisor that many dividends share. With the correctly rounded inverse z of d, the three
// operations q = xz, r = qd - x, q - rz give the correctly rounded x / d (Markstein, "IA-64 and
// Elementary Functions", 2000; Brisebarre, Muller and Raina, "Accelerating correctly rounded
// floating-point division when the divisor is known in advance", 2004), unless something under- or
// overflows. They keep the sign of a zero.
struct Divisor {
  float value;
  float inverse;
  // a power of two that scales dividend and divisor, to bring the divisor into range
  float prescale;
  bool regular;  // neither 0 nor infinite nor NaN
  bool fast;     // divide_fast() may be used

  __device__ __forceinline__ explicit Divisor(float d) {
    const float magnitude = fabsf(d);
    prescale = magnitude < kLeast ? 0x1p100f : magnitude > kMost ? 0x1p-100f : 1.0f;
    value = __fmul_rn(d, prescale);
    regular = fabsf(value) >= kLeast && fabsf(value) <= kMost;
    // Refining the inverse of 0 or infinity would give NaN.
    inverse = regular ? inverse_of(value) : approximate_inverse_of(value);
    fast = magnitude >= kLeast && magnitude <= kMost;
  }

  // Requires `fast`, and quotients below kLargest in magnitude.
  __device__ __forceinline__ float divide_fast(float x) const {
    return refine(x, __fmul_rn(x, inverse));
  }

  // For all dividends. The product alone is right for an irregular divisor, and for a quotient that
  // overflows, where the remainder would be NaN.
  __device__ __forceinline__ float divide(float x) const {
    const float scaled = __fmul_rn(x, prescale);
    const float q = __fmul_rn(scaled, inverse);
    return regular && fabsf(q) < kLargest ? refine(scaled, q) : q;
  }

 private:
  // Between these bounds, underflow only affects quotients below 2^-40 in magnitude, far below half
  // a step of either grid.
  static constexpr float kLeast = 0x1p-60f;
  static constexpr float kMost = 0x1p125f;
  static constexpr float kLargest = 0x1p120f;

  __device__ __forceinline__ float refine(float x, float q) const {
    return __fmaf_rn(__fmaf_rn(q, value, -x), -inverse, q);
  }
};

// A divisor between 1 and 2^32 whose inverse the host computes.
struct KnownDivisor {
  float value;
  float inverse;

  __host__ __device__ constexpr explicit KnownDivisor(float d) : value(d), inverse(1.0f / d) {}

  // Correctly rounded x / value for all x.
  __device__ __forceinline__ float divide(float x) const {
    const float magnitude = fabsf(x);
    if (magnitude < 0x1p-60f || !(magnitude < 0x1p100f)) {
      return __fdiv_rn(x, value);
    }
    const float q = __fmul_rn(x, inverse);
    return __fmaf_rn(__fmaf_rn(q, value, -x), -inverse, q);
  }
};

template <int N>
__device__ __forceinline__ float sum_values(const float (&values)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum = __fadd_rn(sum, values[i]);
  }
  return sum;
}

template <int N>
__device__ __forceinline__ float sum_squares(const float (&values)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum = __fmaf_rn(values[i], values[i], sum);
  }
  return sum;
}

__device__ __forceinline__ float root_mean_square(float sum, const KnownDivisor& k, float eps) {
  return __fsqrt_rn(__fadd_rn(k.divide(sum), eps));
}

// The maximum of `largest` and the magnitudes; NaN if any is NaN.
template <int N>
__device__ __forceinline__ float max_magnitude_of(float largest, const float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    largest = max_magnitude(largest, values[i]);
  }
  return largest;
}

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Whether any value is NaN. The compiler compares pairs: an instruction for two values.
template <int N>
__device__ __forceinline__ bool holds_nan(const float (&values)[N]) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    found |= isnan(values[i]);
  }
  return found;
}

inline constexpr float kSmallestScale = 0x1p-126f;  // the smallest normal number

// The scale that maps the largest magnitude of a row to the end of Out's grid.
template <typename Out>
__device__ __forceinline__ float dynamic_scale(float largest) {
  constexpr KnownDivisor kGridMax(Out::kGridMax);
  const float scale = kGridMax.divide(largest);
  return scale < kSmallestScale ? kSmallestScale : scale;  // NaN stays
}

// The least power of two that is not smaller; NaN and infinity stay.
__device__ __forceinline__ float ceil_power_of_two(float positive) {
  constexpr uint32_t kMantissa = 0x7fffffu;
  const uint32_t bits = __float_as_uint(positive);
  return positive < INFINITY ? __uint_as_float((bits + kMantissa) & ~kMantissa) : positive;
}

// Adding this rounds a float of magnitude below 2^22 to an integer, ties to even, in the low bits
// of the sum.
inline constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23

__device__ __forceinline__ uint32_t pack_bytes(const uint32_t (&low_bytes)[4]) {
  const uint32_t low = __byte_perm(low_bytes[0], low_bytes[1], 0x0040);
  const uint32_t high = __byte_perm(low_bytes[2], low_bytes[3], 0x0040);
  return __byte_perm(low, high, 0x5410);
}

__device__ __forceinline__ uint32_t pack_e4m3(const float (&q)[4]) {
  if constexpr (kHasE4m3Rounding) {
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(q[1]), "f"(q[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(q[3]), "f"(q[2]));
    return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
  } else {
    return round_to_e4m3(q[0]) | round_to_e4m3(q[1]) << 8 | round_to_e4m3(q[2]) << 16 |
           round_to_e4m3(q[3]) << 24;
  }
}

// The 8-bit grid that quotients are rounded to, and its zero point.
template <typename Out>
struct Grid;

template <>
struct Grid<dtype::int8> {
  float zero_point;  // an integer

  __device__ __forceinline__ explicit Grid(float zero) : zero_point(zero) {}

  // Quotients of a row by its own dynamic scale: rounded, they are within -127..127.
  __device__ __forceinline__ static uint32_t encode_bounded(const float (&q)[4]) {
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i] = __float_as_uint(__fadd_rn(q[i], kRoundingShift));
    }
    return pack_bytes(codes);
  }

  // Any quotients. NaN becomes 0.
  __device__ __forceinline__ uint32_t encode(const float (&q)[4]) const {
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Beyond 2^22 the rounding shift is too coarse, but there every code saturates.
      const float code =
          __fadd_rn(__fadd_rn(__fadd_rn(q[i], kRoundingShift), -kRoundingShift), zero_point);
      codes[i] = static_cast<uint32_t>(__float2int_rn(clamp(code, -128.0f, 127.0f)));
    }
    return pack_bytes(codes);
  }
};

template <>
struct Grid<dtype::e4m3> {
  __device__ __forceinline__ explicit Grid(float) {}

  __device__ __forceinline__ static uint32_t encode_bounded(const float (&q)[4]) {
    return pack_e4m3(q);
  }
  // Any quotients; infinities saturate too, and NaN becomes 0x7f.
  __device__ __forceinline__ static uint32_t encode(const float (&q)[4]) { return pack_e4m3(q); }
};

}  // namespace ostinato
