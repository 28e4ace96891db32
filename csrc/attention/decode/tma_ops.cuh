// TMA, prefetch, copy and barrier instructions that only decode attention uses. Names and
// semantics: PTX ISA, "cp.async", "cp.async.bulk.prefetch.tensor", "mbarrier.inval".
#pragma once

#include "common/cache_policy.cuh"
#include "common/tma.cuh"

namespace ostinato::decode {

// Prefetches a box into L2, as a hint. Parts outside the tensor are not read.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, const int (&corner)[5]) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
               "r"(corner[0]), "r"(corner[1]), "r"(corner[2]), "r"(corner[3]), "r"(corner[4])
               : "memory");
}

// Copies a box of data that is read only once (evict-first).
__device__ __forceinline__ void tma_load_once(void* shared, const CUtensorMap& map,
                                              const int (&corner)[5], uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(corner[0]), "r"(corner[1]), "r"(corner[2]), "r"(corner[3]), "r"(corner[4]),
      "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// Invalidates a barrier without waiters or pending arrivals; it may then be initialised again.
__device__ __forceinline__ void retire_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void copy_word(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

// Prefetches a cache line into L2.
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

}  // namespace ostinato::decode
