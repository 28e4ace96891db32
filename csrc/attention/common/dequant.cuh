// Exact conversion of 8-bit cache elements to pairs of 16-bit elements: FP16 and BF16 represent
// every E4M3 and every INT8 value.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/pack_pair.cuh"

namespace ostinato {

// `first`: from the two low bytes of a word; `second`: from the two high bytes.
struct Pairs {
  uint32_t first, second;
};

// Selects bytes of a (0 to 3) and b (4 to 7): one hexadecimal digit of `selection` per result byte,
// lowest first.
__device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selection) {
  return __byte_perm(a, b, selection);
}

template <class Pair>
__device__ __forceinline__ uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  const Pair difference =
      __hsub2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(difference);
}

__device__ __forceinline__ Pairs e4m3_to_fp16(uint32_t word) {
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

// Through FP16 and FP32: Hopper has no instruction for it, and NaN stays NaN.
__device__ __forceinline__ uint32_t fp16_to_bf16(uint32_t pair) {
  const float2 numbers = __half22float2(reinterpret_cast<const __half2&>(pair));
  return pack_pair<__nv_bfloat16>(numbers.x, numbers.y);
}

// x + 128 as the low bits of the FP16 number 1024 + (x + 128), minus 1152.
__device__ __forceinline__ Pairs int8_to_fp16(uint32_t word) {
  const uint32_t shifted = word ^ 0x80808080u;
  return {subtract_pairs<__half2>(select_bytes(shifted, 0x64646464u, 0x4140), 0x64806480u),
          subtract_pairs<__half2>(select_bytes(shifted, 0x64646464u, 0x4342), 0x64806480u)};
}

// The low 7 bits of x as those of the BF16 number 128 + (x & 127), minus 128, or minus 256 if the
// sign is set: the bits of both numbers differ from 0x4300 by the bits of x alone.
__device__ __forceinline__ uint32_t int8_pair_to_bf16(uint32_t pair) {
  return subtract_pairs<__nv_bfloat162>(pair & 0xff7fff7fu, pair & 0xff80ff80u);
}
__device__ __forceinline__ Pairs int8_to_bf16(uint32_t word) {
  return {int8_pair_to_bf16(select_bytes(word, 0x43434343u, 0x4140)),
          int8_pair_to_bf16(select_bytes(word, 0x43434343u, 0x4342))};
}

// Converts the four elements of a word from `Code`, __nv_fp8_e4m3 or int8_t, to T.
template <class Code, class T>
__device__ __forceinline__ Pairs dequantize(uint32_t word) {
  constexpr bool kToFp16 = std::is_same_v<T, __half>;
  static_assert(kToFp16 || std::is_same_v<T, __nv_bfloat16>, "two 16-bit types");
  if constexpr (std::is_same_v<Code, int8_t>) {
    return kToFp16 ? int8_to_fp16(word) : int8_to_bf16(word);
  } else {
    static_assert(std::is_same_v<Code, __nv_fp8_e4m3>, "two 8-bit types");
    const Pairs pairs = e4m3_to_fp16(word);
    return kToFp16 ? pairs : Pairs{fp16_to_bf16(pairs.first), fp16_to_bf16(pairs.second)};
  }
}

}  // namespace ostinato
