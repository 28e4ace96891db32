// Cluster instructions and indices: CTAs of a cluster run at the same time and access each other's
// shared memory. Names and semantics: PTX ISA, "barrier.cluster", "mapa", "st.async".
#pragma once

#include "common/mbarrier.cuh"
#include "config.cuh"

namespace ostinato::decode {

__device__ __forceinline__ int rank_in_cluster() {
  return kClusterCtas == 1 ? 0 : static_cast<int>(blockIdx.x) % kClusterCtas;
}
// Offset of a block of this CTA within a tile. With fixed splits, a CTA of a cluster has the blocks
// that the warp of the same rank has in a CTA without a cluster.
__device__ __forceinline__ int block_offset(int block) {
  return kChainPerCta ? block * kShareTokens + rank_in_cluster() * kBlockTokens
                      : rank_in_cluster() * kShareTokens + block * kBlockTokens;
}
__device__ __forceinline__ int cluster_index() {
  return static_cast<int>(blockIdx.x) / kClusterCtas;
}

// A warp's index in the cluster.
__device__ __forceinline__ int region_of(int warp) { return rank_in_cluster() * kWarps + warp; }

// Arrives at the cluster barrier without ordering memory accesses. Called by whole warps.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Waits until all threads of the cluster have arrived. Called by whole warps.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores to the same address in CTA `rank`, and completes the bytes at that CTA's barrier. Without
// a cluster it only stores.
__device__ __forceinline__ void send(float4* target, uint64_t* barrier, int rank,
                                     const float4& value) {
  if constexpr (kClusterCtas == 1) {
    *target = value;
    return;
  }
  asm volatile(
      "{\n"
      ".reg .b32 target, barrier;\n"
      "mapa.shared::cluster.u32 target, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[target], {%3, %4, %5, %6}, [barrier];\n"
      "}" ::"r"(shared_address(target)),
      "r"(shared_address(barrier)), "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z),
      "f"(value.w)
      : "memory");
}

}  // namespace ostinato::decode
