// The parts of a ring of bulk copies: the copy engine's global-to-shared copy, and a position.
// Semantics: PTX ISA, "cp.async.bulk".
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"

namespace ostinato {

// Copies `bytes` (a multiple of 16, between 16-byte aligned addresses); `barrier` counts them.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// A position in a ring of `kStages` slots, and how often the ring has gone round (its parity).
template <int kStages>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace ostinato
