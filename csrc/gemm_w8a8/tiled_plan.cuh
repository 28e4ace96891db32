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
  int token_rows;  // of a stage: tile_tokens in whole groups, for every CTA of the cluster
  int stages;
  int stage_bytes, weight_bytes;
  int depth_steps;                  // stages of a whole tile
  int token_tiles, channel_groups;  // a group: the tiles of one cluster
  int band;                         // channel groups that are walked side by side
  int clusters;
  int items;        // of work: whole groups, then tiles whose K the CTAs of a cluster share
  int whole_items;  // items before this are whole groups
  int smem_bytes;
  bool aligned_out;   // rows of out begin at multiples of 16 bytes
  bool whole_blocks;  // a tile is whole blocks of 64 channels, and TMA can write rows of out
};

// What a CTA does at a time: a tile, and the stages of K that it sums.
struct Item {
  int channel, token;  // first of the tile
  int first_step, steps;
  bool shared;  // with the other CTA of the cluster, which sums the other half of K
};

__device__ __forceinline__ Item item_at(const Plan& plan, int index, int rank) {
  const bool shared = index >= plan.whole_items;
  const int tail = index - plan.whole_items;
  const int group = shared ? plan.whole_items + tail / 2 : index;
  const int band_groups = plan.band * plan.token_tiles;
  const int band = group / band_groups;
  const int within = group - band * band_groups;
  const int first = band * plan.band;
  const int left = plan.channel_groups - first;
  const int width = left < plan.band ? left : plan.band;
  const int token_tile = within / width;
  const int channel_group = first + within - token_tile * width;
  const int channel_tile = channel_group * plan.cluster + (shared ? tail % 2 : rank);
  const int half = ceil_div(plan.depth_steps, 2);
  return {channel_tile * plan.tile_channels, token_tile * plan.tile_tokens,
          shared ? rank * half : 0, shared ? half : plan.depth_steps, shared};
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
// compiled tile reaches, and CTAs that share a tile exchange half of its sums in the ring.
inline void fit_ring(Plan* plan) {
  const int spare_tokens = (kTokens - plan->token_rows) * kUnitDepth;
  const int spare_channels = (kChannels - plan->tile_channels) * kPackedDepth;
  const int spare = spare_tokens > spare_channels ? spare_tokens : spare_channels;
  plan->stages = (kSmemLimit - kRingOffset - spare) / plan->stage_bytes;
  plan->stages = plan->stages < kMaxStages ? plan->stages : kMaxStages;
  plan->smem_bytes = kRingOffset + plan->stages * plan->stage_bytes + spare;
  const bool exchanges = plan->items > plan->whole_items;
  if (exchanges && plan->smem_bytes < kRingOffset + kExchangeBytes) {
    plan->smem_bytes = kRingOffset + kExchangeBytes;
  }
}

// Divides the groups among the clusters, in rounds. With split_k, those of the last round, where
// they leave half of the clusters idle, are cut into tiles for one cluster each.
inline bool share_out(int split_k, int sms, Plan* plan) {
  const int64_t groups = int64_t(plan->token_tiles) * plan->channel_groups;
  const int resident = sms / plan->cluster;
  if (resident == 0 || groups > INT32_MAX - 2 * resident) {
    return false;
  }
  plan->items = plan->whole_items = static_cast<int>(groups);
  if (split_k > 1) {
    const int left = plan->items % resident;
    if (!kCanSplit || plan->cluster != 2 || 2 * left > resident) {
      return false;
    }
    plan->whole_items -= left;
    plan->items += left;
  }
  plan->clusters = plan->items < resident ? plan->items : resident;
  return true;
}

// Returns false for a plan that this kernel cannot carry out.
inline bool make_plan(const W8A8GemmParams& params, int sms, Plan* plan) {
  plan->tile_channels = params.tile_channels > 0 ? params.tile_channels : kChannels;
  plan->tile_tokens =
      params.tile_tokens > 0 ? params.tile_tokens : ceil_div(params.m, ceil_div(params.m, kTokens));
  plan->cluster = params.cluster > 0 ? params.cluster : 1;
  if (plan->tile_channels > kChannels || plan->tile_channels % kPackedRows != 0 ||
      plan->tile_tokens > kTokens || plan->cluster > 2 || params.split_k > 2) {
    return false;
  }
  plan->token_rows = round_up(plan->tile_tokens, kTokenGroup * plan->cluster);
  plan->weight_bytes = plan->tile_channels * kStageDepth;
  plan->stage_bytes = plan->weight_bytes + plan->token_rows * kStageDepth;
  plan->depth_steps = ceil_div(params.k, kStageDepth);
  plan->token_tiles = ceil_div(params.m, plan->tile_tokens);
  plan->channel_groups = ceil_div(ceil_div(params.n, plan->tile_channels), plan->cluster);
  if (!share_out(params.split_k, sms, plan)) {
    return false;
  }
  fit_ring(plan);
  plan->band = params.band > 0 ? params.band : square_band(*plan);
  plan->band = plan->band < plan->channel_groups ? plan->band : plan->channel_groups;
  plan->aligned_out = reinterpret_cast<uintptr_t>(params.out) % 16 == 0 &&
                      params.out_stride * sizeof(Output) % 16 == 0;
  plan->whole_blocks = plan->tile_channels % kMmaRows == 0 && plan->aligned_out &&
                       params.n * sizeof(Output) % 16 == 0 &&
                       params.n * sizeof(Output) <= INT32_MAX;  // TMA counts bytes
  return plan->stages >= 2;
}

}  // namespace ostinato::tiled
