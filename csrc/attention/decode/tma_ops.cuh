// TMA and barrier instructions that only decode attention uses.
// Names and semantics: PTX ISA, "cp.async.bulk.prefetch.tensor", "mbarrier.inval".
#pragma once

#include "common/cache_policy.cuh"
#include "common/tma.cuh"

namespace ostinato::decode {

// A box into the L2 cache: a hint. Nothing is read of what is outside the tensor.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, const int (&corner)[5]) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
               "r"(corner[0]), "r"(corner[1]), "r"(corner[2]), "r"(corner[3]), "r"(corner[4])
               : "memory");
}

// Copies a box of what is read once.
__device__ __forceinline__ void tma_load_once(void* shared, const CUtensorMap& map,
                                              const int (&corner)[5], uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(corner[0]), "r"(corner[1]), "r"(corner[2]), "r"(corner[3]), "r"(corner[4]),
      "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// Ends a barrier that nobody waits for and nothing arrives at; its place may be initialised again.
__device__ __forceinline__ void retire_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

}  // namespace ostinato::decode
