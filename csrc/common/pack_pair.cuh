// Packs two floats as the two 16-bit elements of a word.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ostinato {

// Rounds to T; the first element is in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  static_assert(sizeof(T) == 2, "two elements in a word");
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace ostinato
