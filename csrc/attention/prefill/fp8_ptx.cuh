// Instructions without a name in CUDA C++ that prefill attention with 8 bits needs.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"

namespace ostinato::prefill {

// Four 8 x 8 matrices of byte pairs from shared memory, transposed; lane l says where row l % 8 of
// matrix l / 8 lies (PTX ISA, "ldmatrix").
__device__ __forceinline__ void load_transposed(const void* row, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

// Four weights, in the order of their keys. (Those above 448 would be 448.)
__device__ __forceinline__ uint32_t pack_four(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

}  // namespace ostinato::prefill
