// Memory that GPUs write for each other. Words of 32 bits arrive whole and in any order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ostinato {

__device__ __forceinline__ void store_to_peer(uint4* to, const uint4& words) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_from_peer(const uint4* from) {
  uint4 words;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}

// Of a single word: of the host, or of control words that other CTAs write.
__device__ __forceinline__ void store_word(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t load_word(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

// Loads a constant, and does so here: before the wait for the preceding kernel.
template <typename T>
__device__ __forceinline__ T* load_address(T* const* from) {
  T* address;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(address) : "l"(from));
  return address;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace ostinato
