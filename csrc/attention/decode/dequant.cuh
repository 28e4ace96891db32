// 8-bit cache elements as pairs of FP16, which holds every E4M3 and every INT8 value. So the
// product with a 16-bit query is that of the dequantised cache, and more exact than BF16 weights
// would be.
//
// Two 8-bit elements fill a 16-bit one of ldmatrix. Keys: a lane's four neighbours of the head dim
// are where an MMA wants two pairs, so the query is loaded in that order (Mainloop::begin).
// Values, transposed: a word holds two tokens times two neighbours d, d + 1, which become rows
// lane / 4 and lane / 4 + 8 of the output.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "config.cuh"

namespace ostinato::decode {

// `first` of the two low bytes, `second` of the two high ones.
struct Pairs {
  uint32_t first, second;
};

// Bytes of a (0 to 3) and b (4 to 7), a hexadecimal digit of `selection` for each, lowest first.
__device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selection) {
  return __byte_perm(a, b, selection);
}

__device__ __forceinline__ Pairs dequantize_e4m3(uint32_t word) {
  Pairs pairs;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(pairs.first), "=r"(pairs.second)
      : "r"(word));
  return pairs;
}

__device__ __forceinline__ uint32_t subtract_halves(uint32_t a, uint32_t b) {
  const __half2 difference =
      __hsub2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(difference);
}

// x + 128 as the low bits of 1024 + (x + 128), less 1152.
__device__ __forceinline__ Pairs dequantize_int8(uint32_t word) {
  const uint32_t shifted = word ^ 0x80808080u;
  return {subtract_halves(select_bytes(shifted, 0x64646464u, 0x4140), 0x64806480u),
          subtract_halves(select_bytes(shifted, 0x64646464u, 0x4342), 0x64806480u)};
}

__device__ __forceinline__ Pairs dequantize(uint32_t word) {
  if constexpr (std::is_same_v<Cache, Int8>) {
    return dequantize_int8(word);
  } else {
    return dequantize_e4m3(word);
  }
}

// Bytes 0 and 2, and 1 and 3.
__device__ __forceinline__ Pairs dequantize_even_and_odd(uint32_t word) {
  return dequantize(select_bytes(word, 0, 0x3120));
}

// A power of two that brings a number near 1: FP16 has less range than BF16. 1 if there is none.
__device__ __forceinline__ float exponent_of(float magnitude) {
  const uint32_t exponent = __float_as_uint(magnitude) & 0x7f800000u;
  return exponent == 0 || exponent == 0x7f800000u ? 1.0f : __uint_as_float(exponent);
}

// Two vectors of each token are loaded at once: one step of 16-bit elements, two of 8-bit ones.
inline constexpr int kStepsPerLoad = kQuantized ? 2 : 1;
inline constexpr int kLoads = ceil_div(kSteps, kStepsPerLoad);

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
