// Shared memory of a CTA, and the indices of warps and teams in it.
#pragma once

#include "common/mbarrier.cuh"
#include "config.cuh"

namespace ostinato::decode {

// Tags: keys and values have rings of the same layout and of different types.
struct Keys {};
struct Values {};

template <class What>
struct Blocks {
  // the swizzle repeats every 1024 bytes
  alignas(1024) uint8_t blocks[kStages][kWarps][kBlockBytes];
};

// Full barriers of the blocks of a stage.
template <class What>
struct Arrivals {
  uint64_t full[kStages][kArrivals];
};

// What a warp receives from the warps of the cluster's CTAs that own the same steps, by CTA rank:
// for each pair of columns, the vectors of its slice, and the weights.
template <int kCtas>
struct ClusterReduceStorage {
  float4 outputs[kWarps][kCtas][kWarpPairs][kRankVectors];
  float4 weights[kWarps][kCtas][kWarpPairs];
  uint64_t arrived[kWarps];
};
template <>
struct ClusterReduceStorage<1> {};

// Exchange between the warps of a serial chain (serial_chain.cuh).
template <bool kUsed>
struct Chain {
  float2 tops[kWarps][4];     // maxima of a block's columns, by pairs
  uint4 weights[kWarps][32];  // of a block, by lane: P and the sums of two columns
};
template <>
struct Chain<false> {};

// Ring of the work tiles that the CTA has requested from the dynamic scheduler.
inline constexpr int kScheduledAhead = 4;
template <bool kUsed>
struct SchedulerRing {
  uint64_t published[kScheduledAhead];
  int work_tile[kScheduledAhead];
};
template <>
struct SchedulerRing<false> {};

struct SharedStorage {
  Blocks<Keys> keys;
  Blocks<Values> values;
  Arrivals<Keys> keys_arrived;
  Arrivals<Values> values_arrived;
  // Scales of the tokens of a block: 16 of keys, 16 of values. Used if tokens have their own.
  float scales[kQuantized ? kStages : 1][kWarps][kQuantized ? 2 * kBlockTokens : 1];
  // Exchange between teams in the epilogue: outputs of one team for the steps of another, by lane,
  // and the maximum and sum of weights of each column.
  float4 sums[kTeams][kTeams > 1 ? kTeams - 1 : 1][kTeamWarps][kTeams > 1 ? kOwnedSteps : 1][32];
  alignas(16) float2 weights[kTeams][kColumns];
  ClusterReduceStorage<kClusterCtas> cluster_reduce;
  Chain<kChainPerCta> chain;
  SchedulerRing<kMayScheduleDynamically> scheduler;
  // The length tables: one for the CTA or, with few sequences, one per warp.
  int4 load[kWarps];
  int start[kMaxBatch + 1];
  int seqlen[kMaxBatch + 1];
  // If L2 partitions are known: those of the sequences' first pages (a bit each), the CTA's number,
  // and the partition of its SM.
  uint32_t partitions[kMayPartitionL2 ? kMaxBatch / 32 : 1];
  int number;
  uint32_t partition;
};

template <class What>
__device__ __forceinline__ Blocks<What>& ring_of(SharedStorage& shared) {
  if constexpr (std::is_same_v<What, Keys>) {
    return shared.keys;
  } else {
    return shared.values;
  }
}

template <class What>
__device__ __forceinline__ Arrivals<What>& arrivals_of(SharedStorage& shared) {
  if constexpr (std::is_same_v<What, Keys>) {
    return shared.keys_arrived;
  } else {
    return shared.values_arrived;
  }
}

static_assert(sizeof(SharedStorage) <= 228 * 1024 / kCtasPerSm - 1024,
              "the CTAs of an SM share 228 KB, less 1 KB each");

// Warp index, in a form that the compiler knows to be warp-uniform. Called by all lanes.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
}

// The team of warps that load and multiply the same blocks.
__device__ __forceinline__ int team_of(int warp) { return warp / kTeamWarps; }

// Index of the barrier at which a warp's copies arrive.
__device__ __forceinline__ int arrival_of(int warp) { return warp / kArrivalWarps; }

// Index of the owner of steps of the head dim.
__device__ __forceinline__ int owner_of(int warp) { return kChainPerCta ? warp : team_of(warp); }

// Barrier of the warps of a team.
__device__ __forceinline__ void sync_team(int warp) {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else {
    sync_named(1 + team_of(warp), kTeamWarps * 32);
  }
}

}  // namespace ostinato::decode
