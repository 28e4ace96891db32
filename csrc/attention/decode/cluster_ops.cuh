// Clusters: CTAs that run at the same time and reach each other's shared memory.
// Names and semantics: PTX ISA, "barrier.cluster", "mapa", "st.async".
#pragma once

#include "common/mbarrier.cuh"
#include "config.cuh"

namespace ostinato::decode {

__device__ __forceinline__ int rank_in_cluster() {
  return kClusterCtas == 1 ? 0 : static_cast<int>(blockIdx.x) % kClusterCtas;
}
// Where one of the CTA's blocks begins in a tile. With fixed splits a CTA of a cluster has those
// that a lone one's warp of its rank has.
__device__ __forceinline__ int block_offset(int block) {
  return kChainPerCta ? block * kShareTokens + rank_in_cluster() * kBlockTokens
                      : rank_in_cluster() * kShareTokens + block * kBlockTokens;
}
__device__ __forceinline__ int cluster_index() {
  return static_cast<int>(blockIdx.x) / kClusterCtas;
}

// A warp's place among those of the cluster.
__device__ __forceinline__ int region_of(int warp) { return rank_in_cluster() * kWarps + warp; }

// This thread has come here; it orders no memory traffic. By whole warps.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Waits until all threads of the cluster have arrived. By whole warps.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes to the same place in CTA `rank`, and then counts the bytes at its barrier. Without a
// cluster it only writes.
__device__ __forceinline__ void send(float4* place, uint64_t* barrier, int rank,
                                     const float4& value) {
  if constexpr (kClusterCtas == 1) {
    *place = value;
    return;
  }
  asm volatile(
      "{\n"
      ".reg .b32 place, barrier;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[place], {%3, %4, %5, %6}, [barrier];\n"
      "}" ::"r"(shared_address(place)),
      "r"(shared_address(barrier)), "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z),
      "f"(value.w)
      : "memory");
}

}  // namespace ostinato::decode
