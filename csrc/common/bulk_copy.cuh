// Bulk copies (without tensor map) from global to shared memory. Semantics: PTX ISA,
// "cp.async.bulk".
#pragma once

#include <cstdint>

#include "cache_policy.cuh"
#include "mbarrier.cuh"

namespace ostinato {

// Copies `bytes` that are read once (a multiple of 16, between 16-byte aligned addresses) and
// completes them at `barrier`.
__device__ __forceinline__ void bulk_copy_once(void* shared, const void* global, uint32_t bytes,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

}  // namespace ostinato
