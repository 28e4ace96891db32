// What only decode attention asks of the copy engine and of its barriers.
// Names and semantics: PTX ISA, "cp.async.bulk", "mbarrier".
#pragma once

#include "common/tma.cuh"

namespace ostinato::decode {

// A box into the L2 cache: a hint. Nothing is read of what is outside the tensor.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, const int (&corner)[5]) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
               "r"(corner[0]), "r"(corner[1]), "r"(corner[2]), "r"(corner[3]), "r"(corner[4])
               : "memory");
}

// Ends a barrier that nobody waits for and nothing arrives at; its place may be initialised again.
__device__ __forceinline__ void retire_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Copies `bytes` (a multiple of 16, between 16-byte aligned addresses) from global to shared
// memory; `barrier` counts them.
__device__ __forceinline__ void copy_bytes(void* shared, const void* global, uint32_t bytes,
                                           uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Lets the copy engine see what this thread sees of global memory.
__device__ __forceinline__ void fence_global_for_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace ostinato::decode
