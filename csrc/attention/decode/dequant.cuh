// Dequantisation: converts 8-bit cache elements to pairs of FP16, which represents every E4M3 and
// every INT8 value exactly. The product with a 16-bit query is that of the dequantised cache; BF16
// operands would round the softmax weights more coarsely.
//
// ldmatrix sees two 8-bit elements as one 16-bit element. Keys: the four adjacent elements of a
// lane are used as the two pairs of an MMA operand, and the query is loaded in the same order
// (q_fragments.cuh). Values, transposed: a word holds two tokens times two adjacent elements d, d +
// 1, which become rows lane / 4 and lane / 4 + 8 of the output.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention/common/dequant.cuh"
#include "config.cuh"

namespace ostinato::decode {

__device__ __forceinline__ Pairs dequantize(uint32_t word) {
  using Code = std::conditional_t<std::is_same_v<Cache, Int8>, int8_t, __nv_fp8_e4m3>;
  return ostinato::dequantize<Code, __half>(word);
}

// Pairs of bytes 0 and 2, and of bytes 1 and 3.
__device__ __forceinline__ Pairs dequantize_even_and_odd(uint32_t word) {
  return dequantize(select_bytes(word, 0, 0x3120));
}

// The power of two of a number's exponent, to scale it near 1 (FP16 has less range than BF16); 1
// for zero, infinity and NaN.
__device__ __forceinline__ float exponent_of(float magnitude) {
  const uint32_t exponent = __float_as_uint(magnitude) & 0x7f800000u;
  return exponent == 0 || exponent == 0x7f800000u ? 1.0f : __uint_as_float(exponent);
}

// One ldmatrix loads two vectors of each token: one step of 16-bit elements, two of 8-bit ones.
inline constexpr int kStepsPerLoad = kQuantized ? 2 : 1;
inline constexpr int kLoads = ceil_div(kSteps, kStepsPerLoad);
inline constexpr int kHeldLoads = ceil_div(kHeldSteps, kStepsPerLoad);  // of values
static_assert(!kChainPerCta || kOwnedSteps % kStepsPerLoad == 0, "no warps share a load of values");

__device__ __forceinline__ void key_operand(uint32_t (&keys)[4], const uint32_t (&words)[4],
                                            int half) {
  if constexpr (kQuantized) {
    const Pairs upper = dequantize(words[2 * half]), lower = dequantize(words[2 * half + 1]);
    keys[0] = upper.first, keys[1] = lower.first;
    keys[2] = upper.second, keys[3] = lower.second;
  } else {
    keys[0] = words[0], keys[1] = words[1], keys[2] = words[2], keys[3] = words[3];
  }
}

__device__ __forceinline__ void value_operand(uint32_t (&values)[4], const uint32_t (&words)[4],
                                              int half) {
  if constexpr (kQuantized) {
    const Pairs low = dequantize_even_and_odd(words[half]),
                high = dequantize_even_and_odd(words[half + 2]);
    values[0] = low.first, values[1] = low.second;
    values[2] = high.first, values[3] = high.second;
  } else {
    values[0] = words[0], values[1] = words[1], values[2] = words[2], values[3] = words[3];
  }
}

}  // namespace ostinato::decode
