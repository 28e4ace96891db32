// MMAs of the grouped GEMM: those of the tiled GEMM, and their groups.
#pragma once

#include "cute/arch/mma_sm90_gmma.hpp"
#include "gemm_w8a8/tiled/wgmma.cuh"

namespace ostinato::tiled {

__device__ __forceinline__ void begin_multiplying() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void commit_multiplication() { cute::warpgroup_commit_batch(); }

// Waits until all but the latest kPending groups of the warpgroup have completed.
template <int kPending>
__device__ __forceinline__ void wait_multiplied() {
  cute::warpgroup_wait<kPending>();
}

}  // namespace ostinato::tiled
