// The activation functions, with one rounding per operation as in runtime/ops/linear/activation.py.
#pragma once

#include "common/quantize_math.cuh"
#include "silu_math.cuh"

namespace ostinato {

enum class Function { none, silu, gelu, gelu_tanh, relu, relu2 };

// max(x, 0); NaN if x is NaN.
__device__ __forceinline__ float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(0.0f));
  return y;
}

// x (1 + erf(x / sqrt(2))) / 2
__device__ __forceinline__ float gelu(float x) {
  const float doubled = __fadd_rn(erff(__fmul_rn(x, 0x1.6a09e6p-1f)), 1.0f);
  return __fmul_rn(doubled, __fmul_rn(x, 0.5f));
}

// 2 sqrt(2 / pi) (x + 0.044715 x^3): x over 1 + exp of minus this is x (1 + tanh of its half) / 2.
__device__ __forceinline__ float gelu_exponent(float x) {
  constexpr float kFactor = 0x1.988454p+0f, kCube = 0x1.2444b2p-4f;
  return __fmul_rn(__fadd_rn(__fmul_rn(__fmul_rn(x, x), kCube), kFactor), x);
}

// f(x). With `kFast`, magnitudes of x are at most kFastLimit.
template <Function kFunction, bool kFast>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kFunction == Function::silu) {
    return kFast ? silu_fast(x) : silu(x);
  } else if constexpr (kFunction == Function::gelu_tanh) {
    const float exponent = gelu_exponent(x);
    return kFast ? divide_regular(x, one_and_exp(exponent)) : over_one_and_exp(x, exponent);
  } else if constexpr (kFunction == Function::gelu) {
    return gelu(x);
  } else {
    const float positive = relu(x);
    return kFunction == Function::relu2 ? __fmul_rn(positive, positive) : positive;
  }
}

// 0: there is nothing faster for small x.
template <Function kFunction>
inline constexpr float kFastLimit = kFunction == Function::silu ? kSiluFastLimit
                                    // of which gelu_exponent is below kSiluFastLimit
                                    : kFunction == Function::gelu_tanh ? 9.5f
                                                                       : 0.0f;

}  // namespace ostinato
