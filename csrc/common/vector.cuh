// Rows of 16-byte vectors: packed elements, their loads and stores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "pack_pair.cuh"

namespace ostinato {

// The two 16-bit elements of a word as fp32, the first from its low half.
template <typename T>
__device__ __forceinline__ void unpack_pair(uint32_t word, float& low, float& high) {
  static_assert(sizeof(T) == 2, "two elements in a word");
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
    low = pair.x;
    high = pair.y;
  }
}

// N elements as stored in memory. 16-bit elements are converted in pairs: a conversion of a single
// one runs on the unit for transcendental functions, with an eighth of the throughput.
template <typename T, int N>
struct Packed {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void unpack(float (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        values[i] = __uint_as_float(words[i]);
      } else {
        unpack_pair<T>(words[i], values[2 * i], values[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void pack(const float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(values[i]);
      } else {
        words[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void set_half_word(int i, uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits);
    words[i / 2] = i % 2 == 0 ? word : words[i / 2] | word << 16;
  }
};

enum class Reuse { kOnce, kEveryRow };

// Loads a constant. Volatile and not .nc: ptxas would move a non-coherent load below the wait for
// the preceding kernel, which would defeat the prefetch.
__device__ __forceinline__ uint4 load_constant(const uint4* address) {
  uint4 quad;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quad.x), "=r"(quad.y), "=r"(quad.z), "=r"(quad.w)
               : "l"(address));
  return quad;
}

// Loads elements first .. first + N of a row of k; those past its end are 0. With kAligned the
// whole vector is inside the row and 16-byte aligned (8-byte for a vector of 8 bytes). Rows are
// read by coherent loads, which stay behind the wait for the kernel that wrote them; `kReuse` (kept
// in cache for other rows) is for constants, or for data read after the wait too.
template <bool kAligned, Reuse kReuse, typename T, int N>
__device__ __forceinline__ void load(const T* row, uint32_t first, uint32_t k,
                                     Packed<T, N>& packed) {
  if constexpr (kAligned && Packed<T, N>::kWords == 2) {
    uint2 pair = make_uint2(0, 0);
    if (first < k) {
      pair = *reinterpret_cast<const uint2*>(row + first);
    }
    packed.words[0] = pair.x;
    packed.words[1] = pair.y;
  } else if constexpr (kAligned) {
    static_assert(Packed<T, N>::kWords % 4 == 0, "a vector has 8 bytes or a multiple of 16");
    const uint4* source = reinterpret_cast<const uint4*>(row + first);
#pragma unroll
    for (int i = 0; i < Packed<T, N>::kWords / 4; ++i) {
      uint4 quad = make_uint4(0, 0, 0, 0);
      if (first < k) {
        quad = kReuse == Reuse::kOnce ? __ldcs(source + i) : load_constant(source + i);
      }
      packed.words[4 * i] = quad.x;
      packed.words[4 * i + 1] = quad.y;
      packed.words[4 * i + 2] = quad.z;
      packed.words[4 * i + 3] = quad.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool inside = first + i < k;
      if constexpr (sizeof(T) == 4) {
        packed.words[i] = inside ? reinterpret_cast<const uint32_t*>(row)[first + i] : 0;
      } else {
        packed.set_half_word(i, inside ? reinterpret_cast<const uint16_t*>(row)[first + i] : 0);
      }
    }
  }
}

// Stores N elements of any size, from `words`.
template <bool kAligned, typename T, int N, int kWords>
__device__ __forceinline__ void store(T* row, uint32_t first, uint32_t k,
                                      const uint32_t (&words)[kWords]) {
  static_assert(kWords * 4 == N * sizeof(T), "the words hold N elements");
  if constexpr (kAligned) {
    if (first < k) {
      if constexpr (kWords == 1) {
        *reinterpret_cast<uint32_t*>(row + first) = words[0];
      } else if constexpr (kWords == 2) {
        *reinterpret_cast<uint2*>(row + first) = make_uint2(words[0], words[1]);
      } else {
        static_assert(kWords == 4, "a vector has 4, 8 or 16 bytes");
        *reinterpret_cast<uint4*>(row + first) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (first + i < k) {
        const uint32_t bits = words[i / kPerWord] >> (i % kPerWord * 8 * sizeof(T));
        if constexpr (sizeof(T) == 1) {
          reinterpret_cast<uint8_t*>(row)[first + i] = static_cast<uint8_t>(bits);
        } else if constexpr (sizeof(T) == 2) {
          reinterpret_cast<uint16_t*>(row)[first + i] = static_cast<uint16_t>(bits);
        } else {
          reinterpret_cast<uint32_t*>(row)[first + i] = bits;
        }
      }
    }
  }
}

}  // namespace ostinato
