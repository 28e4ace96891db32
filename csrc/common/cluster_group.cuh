// The cluster of CTAs that a thread belongs to.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace ostinato {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

using ClusterGroup = cooperative_groups::cluster_group;

__device__ __forceinline__ ClusterGroup this_cluster() {
  return cooperative_groups::this_cluster();
}

#else

// On a GPU without clusters each CTA is one of its own. Members are those of the other.
struct ClusterGroup {
  __device__ static constexpr uint32_t num_blocks() { return 1; }
  __device__ static constexpr uint32_t block_rank() { return 0; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ static constexpr void barrier_arrive() {}
  __device__ __forceinline__ static void barrier_wait() { __syncthreads(); }

  template <typename T>
  __device__ __forceinline__ static T* map_shared_rank(T* shared, uint32_t /*rank*/) {
    return shared;
  }
};

__device__ __forceinline__ ClusterGroup this_cluster() { return {}; }

#endif

}  // namespace ostinato
