// The tile scheduler of the tiled GEMM: tiles of the output, and the order in which CTAs process
// them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/alignment.h"
#include "common/sizes.cuh"
#include "config.cuh"
#include "cutlass/fast_math.h"

namespace ostinato::tiled {

// The launch plan, computed on the host. A tile may be smaller than the compiled one: the MMA then
// multiplies arbitrary data behind it in shared memory, and those results are discarded.
struct Plan {
  int tile_channels, tile_tokens;
  int cluster;         // CTAs with adjacent channels that share their tokens
  bool share_weights;  // the CTAs have adjacent tokens and share their channels instead
  int token_share;     // tokens of a stage that each CTA copies for all that share them
  int token_rows;      // of a stage: tile_tokens rounded up to whole shares of whole groups
  int stages;
  int stage_bytes, weight_bytes;
  int block_bytes;                  // bytes of a stage's weights for 64 of K
  int depth_steps;                  // stages of a whole tile
  int store_shift;                  // log2 of the stages between two deferred stores
  int token_tiles, channel_groups;  // a group: the tiles that a cluster processes at a time
  int band;                         // channel groups that are processed side by side
  cutlass::FastDivmod of_band;      // divides by the groups of a band
  cutlass::FastDivmod of_width, of_last_width;  // by the channel groups of a band; of the last band
  int clusters;
  int work_tiles;        // whole groups, then tiles whose K is shared by the CTAs of a cluster
  int whole_work_tiles;  // the first work tiles, which are whole groups
  int smem_bytes;
  bool aligned_out;   // rows of out begin at multiples of 16 bytes
  bool whole_blocks;  // a tile is whole blocks of 64 channels, and TMA can write rows of out
};

// A unit of work of a CTA: a tile, and the stages of K that it accumulates.
struct WorkTile {
  int channel, token;  // first of the tile
  int first_step, steps;
  // with the other CTA of the cluster, which accumulates the other half of K (split-K)
  bool shared;
};

__device__ __forceinline__ WorkTile work_tile_at(const Plan& plan, int index, int rank) {
  const bool shared = index >= plan.whole_work_tiles;
  const int tail = index - plan.whole_work_tiles;
  const int group = shared ? plan.whole_work_tiles + tail / 2 : index;
  int band, within, token_tile, in_width;
  plan.of_band(band, within, group);
  const bool last = (band + 1) * plan.band > plan.channel_groups;
  (last ? plan.of_last_width : plan.of_width)(token_tile, in_width, within);
  const int channel_group = band * plan.band + in_width;
  const int in_group = shared ? tail % 2 : rank;
  const int channel_tile =
      plan.share_weights ? channel_group : channel_group * plan.cluster + in_group;
  const int own_token_tile = plan.share_weights ? token_tile * plan.cluster + in_group : token_tile;
  const int half_steps = ceil_div(plan.depth_steps, 2);
  return {channel_tile * plan.tile_channels, own_token_tile * plan.tile_tokens,
          shared ? rank * half_steps : 0, shared ? half_steps : plan.depth_steps, shared};
}

// x up to this size stays in an L2 of 50 MB beside the weights and results that stream through.
inline constexpr int64_t kResidentTokens = 24 << 20;

// The band: channel groups that are processed side by side. If x stays in L2, one: each weight is
// then read once for all tokens. Otherwise the side of a square of the tiles that run at the same
// time, which minimises reads of x and w; but one if such a square covers all tokens.
inline int choose_band(const Plan& plan, int64_t bytes_of_x) {
  int band = 1;
  while (int64_t(band) * band * plan.tile_channels * plan.cluster <
         int64_t(plan.clusters) * plan.tile_tokens) {
    ++band;
  }
  return bytes_of_x <= kResidentTokens || plan.token_tiles <= band ? 1 : band;
}

// Computes how many stages fit, and the shared memory they take. The MMA reads past the last stage
// if the tile is smaller than the compiled one, and CTAs that share a tile exchange half of its
// accumulators in the ring.
inline void fit_ring(Plan* plan) {
  const int spare_tokens = (kTokens - plan->token_rows) * kUnitDepth;
  const int spare_channels = (kChannels - plan->tile_channels) * kPackedDepth;
  const int spare = std::max(spare_tokens, spare_channels);
  plan->stages = (kSmemLimit - kRingOffset - spare) / plan->stage_bytes;
  plan->stages = plan->stages < kMaxStages ? plan->stages : kMaxStages;
  plan->smem_bytes = kRingOffset + plan->stages * plan->stage_bytes + spare;
  const bool cluster_reduces = plan->work_tiles > plan->whole_work_tiles;
  if (cluster_reduces && plan->smem_bytes < kRingOffset + kClusterReduceBytes) {
    plan->smem_bytes = kRingOffset + kClusterReduceBytes;
  }
}

// Distributes the groups over the clusters. With split_k, the groups of the last round, if they
// leave half of the clusters idle, are divided into tiles for one cluster each.
inline bool share_out(int split_k, int sms, Plan* plan) {
  const int64_t groups = int64_t(plan->token_tiles) * plan->channel_groups;
  const int resident = sms / plan->cluster;
  if (resident == 0 || groups > INT32_MAX - 2 * resident) {
    return false;
  }
  plan->work_tiles = plan->whole_work_tiles = static_cast<int>(groups);
  if (split_k > 1) {
    const int left = plan->work_tiles % resident;
    if (!kCanSplit || plan->cluster != 2 || 2 * left > resident) {
      return false;
    }
    plan->whole_work_tiles -= left;
    plan->work_tiles += left;
  }
  plan->clusters = plan->work_tiles < resident ? plan->work_tiles : resident;
  return true;
}

// Returns false if this kernel does not support the plan.
inline bool make_plan(const W8A8GemmParams& params, int sms, Plan* plan) {
  plan->tile_channels = params.tile_channels > 0 ? params.tile_channels : kChannels;
  plan->tile_tokens =
      params.tile_tokens > 0 ? params.tile_tokens : ceil_div(params.m, ceil_div(params.m, kTokens));
  plan->cluster = params.cluster > 0 ? params.cluster : 1;
  plan->share_weights = params.share_weights != 0;
  if (plan->tile_channels > kChannels || plan->tile_channels % kPackedRows != 0 ||
      plan->tile_tokens > kTokens || plan->cluster > 2 || params.split_k > 2 ||
      (plan->share_weights && (plan->cluster == 1 || params.split_k > 1))) {
    return false;
  }
  const int sharers = plan->share_weights ? 1 : plan->cluster;
  plan->token_share = round_up(ceil_div(plan->tile_tokens, sharers), kGroupRows);
  plan->token_rows = plan->token_share * sharers;
  plan->weight_bytes = plan->tile_channels * kStageDepth;
  plan->stage_bytes = plan->weight_bytes + plan->token_rows * kStageDepth;
  plan->block_bytes = plan->tile_channels * kPackedDepth;
  plan->depth_steps = ceil_div(params.k, kStageDepth);
  plan->store_shift = 0;  // spreads the chunks of a tile over the mainloop of the next one
  while (kDeferStores && kTileChunks << (plan->store_shift + 1) <= plan->depth_steps) {
    ++plan->store_shift;
  }
  plan->token_tiles = ceil_div(params.m, plan->tile_tokens);
  plan->channel_groups = ceil_div(params.n, plan->tile_channels);
  int* const grouped = plan->share_weights ? &plan->token_tiles : &plan->channel_groups;
  *grouped = ceil_div(*grouped, plan->cluster);
  if (!share_out(params.split_k, sms, plan)) {
    return false;
  }
  fit_ring(plan);
  plan->band = params.band > 0 ? params.band : choose_band(*plan, int64_t(params.m) * params.k);
  plan->band = plan->band < plan->channel_groups ? plan->band : plan->channel_groups;
  plan->of_band = cutlass::FastDivmod(plan->band * plan->token_tiles);
  plan->of_width = cutlass::FastDivmod(plan->band);
  const int last_width = plan->channel_groups % plan->band;
  plan->of_last_width = cutlass::FastDivmod(last_width > 0 ? last_width : plan->band);
  plan->aligned_out = aligned(params.out, params.out_stride * sizeof(Output));
  plan->whole_blocks = plan->tile_channels % kMmaRows == 0 && plan->aligned_out &&
                       params.n * sizeof(Output) % 16 == 0 &&
                       params.n * sizeof(Output) <= INT32_MAX;  // TMA counts bytes
  return plan->stages >= 2;
}

}  // namespace ostinato::tiled
