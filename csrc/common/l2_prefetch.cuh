// Hints to the L2.
#pragma once

#include "target.cuh"

namespace ostinato {

// Has the L2 fetch `bytes` from `address`, both multiples of 16; nobody waits for it. GPUs without
// bulk copies, which came with clusters, do nothing.
__device__ __forceinline__ void prefetch_to_l2(const void* address, int bytes) {
  if constexpr (kHasClusters) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes)
                 : "memory");
  }
}

}  // namespace ostinato
