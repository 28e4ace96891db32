// How a launch of the tiled GEMM cuts its output into tiles, and the order in which CTAs walk them.
#pragma once

#include <cstdint>

#include "tiled_config.cuh"

namespace ostinato::tiled {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// Everything a CTA must know beside the problem. A tile may use less than what was compiled: the
// MMA then multiplies whatever lies behind it in shared memory, and nobody looks at the result.
struct Plan {
  int tile_channels, tile_tokens;
  int cluster;     // CTAs of neighbouring channels that share their tokens
  int split_k;     // CTAs that share the tile, each with a part of K
  int ctas;        // of a cluster: cluster * split_k, one of which is 1
  int token_rows;  // of a stage: tile_tokens in whole groups, for every CTA of the cluster
  int stages;
  int stage_bytes, weight_bytes;
  int depth_steps;                  // stages of one tile, for one CTA
  int token_tiles, channel_groups;  // a group: the tiles of one cluster
  int band;                         // channel groups that are walked side by side
  int clusters;
  int smem_bytes;
  bool whole_blocks;  // a tile is whole blocks of 64 channels, and TMA can write rows of out
};

struct Tile {
  int channel, token;  // its first
};

// The tile of one CTA of a cluster. `rank` is the CTA's among those that share tokens.
__device__ __forceinline__ Tile tile_at(const Plan& plan, int index, int rank) {
  const int band_tiles = plan.band * plan.token_tiles;
  const int band = index / band_tiles;
  const int within = index - band * band_tiles;
  const int first = band * plan.band;
  const int left = plan.channel_groups - first;
  const int width = left < plan.band ? left : plan.band;
  const int token_tile = within / width;
  const int group = first + within - token_tile * width;
  return {(group * plan.cluster + rank) * plan.tile_channels, token_tile * plan.tile_tokens};
}

// The side of a square of tiles that all CTAs work on at a time, in channel groups: the least
// reading of x and w.
inline int square_band(const Plan& plan) {
  int band = 1;
  while (int64_t(band) * band * plan.tile_channels * plan.cluster <
         int64_t(plan.clusters) * plan.tile_tokens) {
    ++band;
  }
  return band;
}

// How many stages fit, and the shared memory they take. The last stage is read as far as the
// compiled tile reaches, and the partners of a split exchange half a tile of sums in the ring.
inline void fit_ring(Plan* plan) {
  const int spare_tokens = (kTokens - plan->token_rows) * kUnitDepth;
  const int spare_channels = (kChannels - plan->tile_channels) * kPackedDepth;
  const int spare = spare_tokens > spare_channels ? spare_tokens : spare_channels;
  plan->stages = (kSmemLimit - kRingOffset - spare) / plan->stage_bytes;
  plan->stages = plan->stages < kMaxStages ? plan->stages : kMaxStages;
  plan->smem_bytes = kRingOffset + plan->stages * plan->stage_bytes + spare;
  if (plan->split_k > 1 && plan->smem_bytes < kRingOffset + kExchangeBytes) {
    plan->smem_bytes = kRingOffset + kExchangeBytes;
  }
}

// Returns false for a plan that this kernel cannot carry out.
inline bool make_plan(const W8A8GemmParams& params, int sms, Plan* plan) {
  plan->tile_channels = params.tile_channels > 0 ? params.tile_channels : kChannels;
  plan->tile_tokens =
      params.tile_tokens > 0 ? params.tile_tokens : ceil_div(params.m, ceil_div(params.m, kTokens));
  plan->cluster = params.cluster > 0 ? params.cluster : 1;
  plan->split_k = params.split_k > 0 ? params.split_k : 1;
  plan->ctas = plan->cluster * plan->split_k;
  if (plan->tile_channels > kChannels || plan->tile_channels % kPackedRows != 0 ||
      plan->tile_tokens > kTokens || plan->ctas > 2) {
    return false;
  }
  plan->token_rows = round_up(plan->tile_tokens, kTokenGroup * plan->cluster);
  plan->weight_bytes = plan->tile_channels * kStageDepth;
  plan->stage_bytes = plan->weight_bytes + plan->token_rows * kStageDepth;
  fit_ring(plan);
  plan->depth_steps = ceil_div(ceil_div(params.k, kStageDepth), plan->split_k);
  plan->token_tiles = ceil_div(params.m, plan->tile_tokens);
  plan->channel_groups = ceil_div(ceil_div(params.n, plan->tile_channels), plan->cluster);
  const int64_t tiles = int64_t(plan->token_tiles) * plan->channel_groups;
  const int resident = sms / plan->ctas;
  plan->clusters = tiles < resident ? static_cast<int>(tiles) : resident;
  plan->band = params.band > 0 ? params.band : square_band(*plan);
  plan->band = plan->band < plan->channel_groups ? plan->band : plan->channel_groups;
  plan->whole_blocks =
      plan->tile_channels % kMmaRows == 0 && reinterpret_cast<uintptr_t>(params.out) % 16 == 0 &&
      params.out_stride * sizeof(Output) % 16 == 0 && params.n * sizeof(Output) % 16 == 0;
  // Tiles are counted in 32 bits, one step beyond the last of them included. Partners of a split
  // exchange sums in the ring, where the next tile's stages would be.
  return plan->stages >= 2 && tiles <= INT32_MAX - resident &&
         (plan->split_k == 1 || (kCanSplit && tiles <= resident));
}

}  // namespace ostinato::tiled
