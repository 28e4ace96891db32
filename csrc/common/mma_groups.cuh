// Groups of a warpgroup's MMAs, which run while the warpgroup does something else (PTX ISA,
// "wgmma.commit_group").
#pragma once

#include "cute/arch/config.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace ostinato {

__device__ __forceinline__ void begin_multiplying() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void commit_multiplication() { cute::warpgroup_commit_batch(); }

// Waits until all but the latest kPending groups of the warpgroup have completed.
template <int kPending>
__device__ __forceinline__ void wait_multiplied() {
  cute::warpgroup_wait<kPending>();
}

}  // namespace ostinato
