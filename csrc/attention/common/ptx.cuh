// PTX instructions and math that the attention kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/async_copy.cuh"
#include "common/mbarrier.cuh"

namespace ostinato {

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 - 2 / (1 + e^2x), which is exact at both ends. Near 0, where it cancels, the first terms of the
// series instead: a large cap magnifies the error.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  constexpr float kTwoLog2E = 2.8853900817779268f, kNear = 0.0625f;
  const float square = x * x;
  const float series = x * fmaf(square, fmaf(square, 2.0f / 15, -1.0f / 3), 1.0f);
  const float power = power_of_2(kTwoLog2E * x);
  return fabsf(x) < kNear ? series : 1.0f - __fdividef(2.0f, 1.0f + power);
}

// sums += rows · columnsᵀ, 16 rows and 8 columns of 16 elements, by a warp (PTX ISA,
// "mma.m16n8k16").
template <class T>
__device__ __forceinline__ void multiply_by_warp(float (&sums)[4], const uint32_t (&rows)[4],
                                                 const uint32_t (&columns)[2]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns[0]), "r"(columns[1]));
  } else {
    static_assert(std::is_same_v<T, __half>, "two 16-bit types");
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns[0]), "r"(columns[1]));
  }
}

// Stores four 8 x 8 matrices to shared memory; lane l addresses row l % 8 of matrix l / 8 (PTX ISA,
// "stmatrix").
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

}  // namespace ostinato
