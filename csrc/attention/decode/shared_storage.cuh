// The shared memory of a CTA.
#pragma once

#include "common/mbarrier.cuh"
#include "config.cuh"

namespace ostinato::decode {

// Keys and values have rings of the same layout and of different types.
struct Keys {};
struct Values {};

template <class What>
struct Blocks {
  alignas(1024) uint8_t blocks[kStages][kWarps][kBlockBytes];  // the swizzle repeats every 1024
};

// For the blocks of a stage.
template <class What>
struct Arrivals {
  uint64_t full[kStages][kArrivals];
};

// What warps get from those of the cluster's CTAs that own the same, by rank: of each pair of
// columns the vectors that are theirs, and the weights.
template <int kCtas>
struct ClusterReduceStorage {
  float4 outputs[kWarps][kCtas][kWarpPairs][kRankVectors];
  float4 weights[kWarps][kCtas][kWarpPairs];
  uint64_t arrived[kWarps];
};
template <>
struct ClusterReduceStorage<1> {};

// Where the warps of a chain hand what they have of their blocks to each other.
template <bool kUsed>
struct Chain {
  float2 tops[kWarps][4];     // of a block's columns, by pairs
  uint4 weights[kWarps][32];  // of a block, lane by lane: P and the sums of two columns
};
template <>
struct Chain<false> {};

// What the CTA has scheduled dynamically, by turns.
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
  // Of the tokens of a block: of 16 keys, then of their values. Only where tokens have their own.
  float scales[kQuantized ? kStages : 1][kWarps][kQuantized ? 2 * kBlockTokens : 1];
  // Where the teams add up their outputs: what one team has of another's steps, lane by lane, and
  // of each column the maximum and the sum of weights.
  float4 sums[kTeams][kTeams > 1 ? kTeams - 1 : 1][kTeamWarps][kTeams > 1 ? kOwnedSteps : 1][32];
  alignas(16) float2 weights[kTeams][kColumns];
  ClusterReduceStorage<kClusterCtas> cluster_reduce;
  Chain<kChainPerCta> chain;
  SchedulerRing<kMayScheduleDynamically> scheduler;
  // The lengths, once for the CTA or, if they are few, for each warp.
  int4 load[kWarps];
  int start[kMaxBatch + 1];
  int seqlen[kMaxBatch + 1];
  // Where halves of the L2 are known: those of first pages, a bit each, the CTA's number, and the
  // half of its SM.
  uint32_t halves[kMayPartitionL2 ? kMaxBatch / 32 : 1];
  int number;
  uint32_t half;
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

// As a value that the compiler knows to be the warp's. By all lanes.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
}

// Of warps that load and multiply the same blocks.
__device__ __forceinline__ int team_of(int warp) { return warp / kTeamWarps; }

// Of the barriers at which a warp's copies arrive.
__device__ __forceinline__ int arrival_of(int warp) { return warp / kArrivalWarps; }

// Of steps of the head dim.
__device__ __forceinline__ int owner_of(int warp) { return kChainPerCta ? warp : team_of(warp); }

// All lanes of the team's warps have come here.
__device__ __forceinline__ void sync_team(int warp) {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else {
    sync_named(1 + team_of(warp), kTeamWarps * 32);
  }
}

}  // namespace ostinato::decode
