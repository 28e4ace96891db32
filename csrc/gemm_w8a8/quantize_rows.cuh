// Rows of 16-byte vectors: loads, stores and reductions of the quantisation kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/debug.cuh"
#include "gemm_w8a8/quantize_math.cuh"

namespace ostinato {

// N elements as they lie in memory. 16-bit ones are converted in pairs: a conversion of one is an
// instruction of the unit for transcendental functions, with an eighth of the throughput.
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
    OSTINATO_DELAY(quantize_maximum_store, warp == blockDim.x / 32 - 1);
    if (lane == 0) {
      partials[warp] = x;
    }
    __syncthreads();
    OSTINATO_DELAY(quantize_maximum_load, warp == 0);
    x = warp_max(lane < blockDim.x / 32 ? partials[lane] : 0.0f);
  }
  return x;
}

// The sum of each of kVectors numbers over the lanes of a warp, all at once: at each of the first
// distances half of them are handed to the other lane, so that lane l ends with number
// l / (32 / kVectors). The pairs that are added are those of an all-lanes sum of each.
template <int kVectors>
__device__ __forceinline__ float warp_sums(float (&sums)[kVectors]) {
  static_assert((kVectors & (kVectors - 1)) == 0 && kVectors <= 32, "numbers are handed in halves");
  const uint32_t lane = threadIdx.x % 32;
  int distance = 16;
#pragma unroll
  for (int half = kVectors / 2; half > 0; half /= 2, distance /= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int v = 0; v < half; ++v) {
      const float kept = upper ? sums[v + half] : sums[v];
      const float handed = upper ? sums[v] : sums[v + half];
      sums[v] = kept + __shfl_xor_sync(0xffffffffu, handed, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) {
    sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], distance);
  }
  return sums[0];
}

// The sum over a row of one non-negative number per vector, for every thread. Thread t of T has the
// vectors t, t + T, t + 2T, ... The order of additions follows from a vector's index in the row
// alone, not from T or the number of vectors a thread has: first within 32 neighbours, then of
// these sums every 32nd, then those 32. (Vectors past the row's end are 0 and change nothing.)
template <int kVectors>
__device__ __forceinline__ float warp_row_sum(float (&sums)[kVectors]) {
  float sum = warp_sums(sums);
#pragma unroll
  for (int distance = 16; distance >= 32 / kVectors; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  return sum;
}

// The second half of it for a row that a CTA shares: `sum` is that of warp_sums.
template <int kVectors, int kPartials>
__device__ __forceinline__ float cta_row_sum(float sum, float (&partials)[kPartials]) {
  constexpr int kLanesPerSum = 32 / kVectors;
  const uint32_t warps = blockDim.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  OSTINATO_DELAY(quantize_sum_store, threadIdx.x / 32 == warps - 1);
  if (lane % kLanesPerSum == 0) {
    partials[lane / kLanesPerSum * warps + threadIdx.x / 32] = sum;
  }
  __syncthreads();
  OSTINATO_DELAY(quantize_sum_load, threadIdx.x / 32 == 0);
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPartials / 32; ++i) {
    const uint32_t partial = 32 * i + lane;
    sum += partial < kVectors * warps ? partials[partial] : 0.0f;
  }
  return warp_sum(sum);
}

}  // namespace ostinato
