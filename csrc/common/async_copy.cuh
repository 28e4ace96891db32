// Copies to shared memory by the threads of a warp (PTX ISA, "cp.async"), and the election of the
// one that asks for copies by TMA.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace ostinato {

// Elects one lane of the warp, the same every time. (The compiler issues TMA instructions without a
// loop over lanes only if it knows that one lane runs; it recognises elect.sync.)
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Copies 16 bytes from global memory to a shared-memory address, by one thread.
__device__ __forceinline__ void copy_vector(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Arrives at the barrier once this thread's earlier cp.async copies have completed.
__device__ __forceinline__ void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Copies the first `bytes` of 16 to a shared-memory address, and zeros for the others.
__device__ __forceinline__ void copy_vector_part(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// Copies 4 bytes to a shared-memory address, or zeros if they do not exist.
__device__ __forceinline__ void copy_word_part(uint32_t shared, const void* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
               "r"(exists ? 4 : 0)
               : "memory");
}

}  // namespace ostinato
