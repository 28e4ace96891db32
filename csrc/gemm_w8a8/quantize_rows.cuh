// Rows of 16-byte vectors: loads, stores and reductions of the quantisation kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "gemm_w8a8/quantize_math.cuh"

namespace ostinato {

// N elements as they lie in memory.
template <typename T, int N>
struct Packed {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void unpack(float (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(T) == 4) {
        values[i] = __uint_as_float(words[i]);
      } else {
        const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
        values[i] = to_float(reinterpret_cast<const T&>(bits));
      }
    }
  }

  __device__ __forceinline__ void pack(const float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T value = from_float<T>(values[i]);
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(value);
      } else {
        set_half_word(i, reinterpret_cast<const uint16_t&>(value));
      }
    }
  }

  __device__ __forceinline__ void set_half_word(int i, uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits);
    words[i / 2] = i % 2 == 0 ? word : words[i / 2] | word << 16;
  }
};

enum class Reuse { kOnce, kEveryRow };

// A read of a constant. Volatile and not .nc: ptxas moves non-coherent loads below the wait for the
// predecessor, and the prefetch would be none.
__device__ __forceinline__ uint4 load_constant(const uint4* address) {
  uint4 quad;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quad.x), "=r"(quad.y), "=r"(quad.z), "=r"(quad.w)
               : "l"(address));
  return quad;
}

// Elements first .. first + N of a row of k; those past its end are 0. With kAligned the whole
// vector is inside the row and 16 bytes divide its address. Rows are read by coherent loads, which
// come after the wait for the kernel that wrote them; reuse in every row is for constants only.
template <bool kAligned, Reuse kReuse, typename T, int N>
__device__ __forceinline__ void load(const T* row, uint32_t first, uint32_t k,
                                     Packed<T, N>& packed) {
  if constexpr (kAligned) {
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

// The reverse, for elements of any size: N of them in `words`.
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

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// The largest of non-negative numbers: they are in the order of their bits, with NaN above all.
__device__ __forceinline__ float warp_max(float x) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

inline constexpr int kMaxWarps = 32;

// The maximum over the threads of a row, a warp, a CTA or a cluster of CTAs, for every thread.
template <bool kWarpPerRow>
__device__ __forceinline__ float row_max(float x, float (&partials)[kMaxWarps]) {
  x = warp_max(x);
  if constexpr (!kWarpPerRow) {
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) {
      partials[warp] = x;
    }
    __syncthreads();
    x = warp_max(lane < blockDim.x / 32 ? partials[lane] : 0.0f);
  }
  return x;
}

// The sum over a row of one non-negative number per vector, for every thread. Thread t of T has the
// vectors t, t + T, t + 2T, ... The order of additions follows from a vector's index in the row
// alone, not from T or the number of vectors a thread has: first within 32 neighbours, then of
// these sums every 32nd, then those 32. (Vectors past the row's end are 0 and change nothing.)
template <bool kWarpPerRow, int kVectors, int kPartials>
__device__ __forceinline__ float row_sum(float (&sums)[kVectors], float (&partials)[kPartials]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    sums[v] = warp_sum(sums[v]);
  }
  if constexpr (kWarpPerRow) {
#pragma unroll
    for (int half = kVectors / 2; half > 0; half /= 2) {
#pragma unroll
      for (int v = 0; v < half; ++v) {
        sums[v] += sums[v + half];
      }
    }
    return sums[0];
  } else {
    const uint32_t warps = blockDim.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        partials[v * warps + threadIdx.x / 32] = sums[v];
      }
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPartials / 32; ++i) {
      const uint32_t partial = 32 * i + lane;
      sum += partial < kVectors * warps ? partials[partial] : 0.0f;
    }
    return warp_sum(sum);
  }
}

}  // namespace ostinato
