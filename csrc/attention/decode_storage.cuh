// What the kernel is given, and the shared memory of a CTA.
#pragma once

#include "common/mbarrier.cuh"
#include "decode_config.cuh"
#include "decode_schedule.cuh"

namespace ostinato::decode {

struct Arguments : PagedDecodeParams {
  Divisors by;
  int group;  // query heads of a KV head
};

// Keys and values have rings of the same layout and of different types.
struct Keys {};
struct Values {};

template <class What>
struct Blocks {
  alignas(1024) uint8_t blocks[kStages][kWarps][kBlockBytes];  // the swizzle repeats every 1024
};

// A team waits for its blocks of a stage.
template <class What>
struct Arrivals {
  uint64_t full[kStages][kTeams];
};

struct SharedStorage {
  Blocks<Keys> keys;
  Blocks<Values> values;
  Arrivals<Keys> keys_arrived;
  Arrivals<Values> values_arrived;
  // Of the tokens of a block: of 16 keys, then of their values. Only where tokens have their own.
  float scales[kQuantized ? kStages : 1][kWarps][kQuantized ? 2 * kBlockTokens : 1];
  // Where the teams add up their outputs, and of each column the maximum and the sum of weights.
  alignas(16) float sums[kTeams][kColumns][kPassStride];
  float2 weights[kTeams][kColumns];
  int last[2];  // whether this CTA adds up the parts of the segment that it ends, and begins
  // The lengths, once for the CTA or, if they are few, for each warp.
  int4 load[kWarps];
  int start[kMaxBatch + 1];
  int length[kMaxBatch];
};

template <class What>
__device__ __forceinline__ Blocks<What>& ring_of(SharedStorage& shared);
template <>
__device__ __forceinline__ Blocks<Keys>& ring_of<Keys>(SharedStorage& shared) {
  return shared.keys;
}
template <>
__device__ __forceinline__ Blocks<Values>& ring_of<Values>(SharedStorage& shared) {
  return shared.values;
}

template <class What>
__device__ __forceinline__ Arrivals<What>& arrivals_of(SharedStorage& shared);
template <>
__device__ __forceinline__ Arrivals<Keys>& arrivals_of<Keys>(SharedStorage& shared) {
  return shared.keys_arrived;
}
template <>
__device__ __forceinline__ Arrivals<Values>& arrivals_of<Values>(SharedStorage& shared) {
  return shared.values_arrived;
}

static_assert(sizeof(SharedStorage) <= 228 * 1024 / kCtasPerSm - 1024,
              "the CTAs of an SM share 228 KB, less 1 KB each");

// Of warps that load and multiply the same blocks.
__device__ __forceinline__ int team_of(int warp) { return warp / kTeamWarps; }

// All lanes of the team's warps have come here.
__device__ __forceinline__ void sync_team(int warp) {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else {
    sync_named(1 + team_of(warp), kTeamWarps * 32);
  }
}

}  // namespace ostinato::decode
