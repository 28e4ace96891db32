// The wgmma instructions of the prefill kernel, with keys or values from shared memory. A warpgroup
// issues them; until the wait it must touch neither accumulators nor weights. Names and layouts:
// PTX ISA, "wgmma.mma_async".
#pragma once

// CuTe provides tiles of 80 or 176 columns only with this macro.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cstdint>
#include <type_traits>
#include <utility>

#include "config.cuh"
#include "cute/arch/config.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace ostinato::prefill {

namespace gmma = cute::SM90::GMMA;

#define OSTINATO_MMA_OF(columns, types, operands) MMA_64x##columns##x16_F32##types##_##operands
#define OSTINATO_MMA(columns, types, operands) OSTINATO_MMA_OF(columns, types, operands)

template <class T>
struct MmaOf {
  using OfKeys = gmma::OSTINATO_MMA(OSTINATO_KEYS, F16F16, SS)<gmma::Major::K, gmma::Major::K>;
  using OfValues = gmma::OSTINATO_MMA(OSTINATO_VALUE_DIM, F16F16,
                                      RS)<gmma::Major::K, gmma::Major::MN>;
};
template <>
struct MmaOf<__nv_bfloat16> {
  using OfKeys = gmma::OSTINATO_MMA(OSTINATO_KEYS, BF16BF16, SS)<gmma::Major::K, gmma::Major::K>;
  using OfValues = gmma::OSTINATO_MMA(OSTINATO_VALUE_DIM, BF16BF16,
                                      RS)<gmma::Major::K, gmma::Major::MN>;
};
template <>
struct MmaOf<__nv_fp8_e4m3> {
#define OSTINATO_MMA_BYTES_OF(columns, operands) MMA_64x##columns##x32_F32E4M3E4M3_##operands##_TN
#define OSTINATO_MMA_BYTES(columns, operands) OSTINATO_MMA_BYTES_OF(columns, operands)
  using OfKeys = gmma::OSTINATO_MMA_BYTES(OSTINATO_KEYS, SS)<>;
  using OfValues = gmma::OSTINATO_MMA_BYTES(OSTINATO_VALUE_DIM, RS)<>;
#undef OSTINATO_MMA_BYTES
#undef OSTINATO_MMA_BYTES_OF
};
#undef OSTINATO_MMA
#undef OSTINATO_MMA_OF

__device__ __forceinline__ gmma::ScaleOut scale_out(bool accumulate) {
  return accumulate ? gmma::ScaleOut::One : gmma::ScaleOut::Zero;
}

template <int... kIndex>
__device__ __forceinline__ void enqueue_keys(uint64_t rows, uint64_t columns,
                                             float (&sums)[kScores], bool accumulate,
                                             std::integer_sequence<int, kIndex...>) {
  MmaOf<Type>::OfKeys::fma(rows, columns, sums[kIndex]..., scale_out(accumulate));
}

template <int... kIndex>
__device__ __forceinline__ void enqueue_values(const uint32_t (&rows)[4], uint64_t columns,
                                               float (&sums)[kOutputs], bool accumulate,
                                               std::integer_sequence<int, kIndex...>) {
  MmaOf<Type>::OfValues::fma(rows[0], rows[1], rows[2], rows[3], columns, sums[kIndex]...,
                             scale_out(accumulate));
}

// sums (+)= rows · columnsᵀ, over kMmaDepth elements of the head dim.
__device__ __forceinline__ void multiply_keys_step(uint64_t rows, uint64_t columns,
                                                   float (&sums)[kScores], bool accumulate) {
  enqueue_keys(rows, columns, sums, accumulate, std::make_integer_sequence<int, kScores>());
}

// sums (+)= rows · columns, over kMmaDepth keys.
__device__ __forceinline__ void multiply_values_step(const uint32_t (&rows)[4], uint64_t columns,
                                                     float (&sums)[kOutputs], bool accumulate) {
  enqueue_values(rows, columns, sums, accumulate, std::make_integer_sequence<int, kOutputs>());
}

__device__ __forceinline__ void begin_multiplying() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void commit_multiplication() { cute::warpgroup_commit_batch(); }
// Waits until all but the latest kPending groups are complete.
template <int kPending>
__device__ __forceinline__ void wait_multiplied() {
  cute::warpgroup_wait<kPending>();
}

// Keeps the compiler from moving register accesses across asynchronous MMAs.
template <int kCount>
__device__ __forceinline__ void pin(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    cute::warpgroup_fence_operand(sums[i]);
  }
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&weights)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) {
    cute::warpgroup_fence_operand(weights[i / 4][i % 4]);
  }
}

}  // namespace ostinato::prefill
