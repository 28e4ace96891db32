// Warp-wide matrix instructions of the decode kernel. Tokens (or elements of the head dim) are the
// 16 rows of an MMA, and query heads its 8 columns: with a group of 4 or 8 heads, little or no MMA
// work goes to padding. Fragment layouts: PTX ISA, "mma.m16n8k16", "ldmatrix", "movmatrix".
#pragma once

#include <cstdint>

#include "attention/common/ptx.cuh"

namespace ostinato::decode {

// Loads four 8 x 8 matrices of 16-bit elements; lane l addresses row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&a)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t transposed;
  // Volatile, as all warp-collective instructions: it must not be moved into a branch.
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// Keeps a value in a register that the compiler would otherwise recompute in every iteration.
__device__ __forceinline__ uint32_t keep(uint32_t value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

}  // namespace ostinato::decode
