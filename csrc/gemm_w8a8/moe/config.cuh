// Compile-time configuration of one grouped GEMM: that of a tiled GEMM with the same macros, and
// its own shared memory.
//
// -DOSTINATO_QUANTIZES=0|1  1: x has 16 bits, and the kernel quantises it to operands of 8
// -DOSTINATO_X=bf16|fp16    of x, if OSTINATO_QUANTIZES
#pragma once

#include <algorithm>

#include "common/cluster.cuh"
#include "common/sizes.cuh"
#include "gemm_w8a8/tiled/config.cuh"
#include "params.h"

namespace ostinato::moe {

using namespace tiled;

static_assert(!kPingPong, "the warpgroups of a grouped GEMM share their tiles");

// Whether two CTAs can be a cluster. They have adjacent tiles of rows and the same channels, and
// where both tiles are of one expert each copies half of its weights, for both.
inline constexpr bool kPairs = kTokens == 128;

// One warp copies weights, the others of the producers' warpgroup gather rows of x.
inline constexpr int kTokenWarps = 3;
inline constexpr int kCtaThreads = (kConsumers + 1) * kWarpgroup;

// Eight lanes copy a row's 128 bytes of a unit. So a lane has every kRowStep-th row of a tile,
// which are listed, four together.
inline constexpr int kRowVectors = 8;
inline constexpr int kRowsAtOnce = 32 / kRowVectors;  // by a warp
inline constexpr int kRowStep = kTokenWarps * kRowsAtOnce;
inline constexpr int kListedRows = round_up(ceil_div(kTokens, kRowStep), 4);

inline constexpr int kTokenBytes = kTokens * kStageDepth;

inline constexpr bool kQuantizes = OSTINATO_QUANTIZES;
static_assert(!kQuantizes || (!k16Bit && kSmallM),
              "few rows of 8-bit operands are quantised by each CTA that multiplies them");
inline constexpr int kXBytes = kQuantizes ? 2 : kOperandBytes;
// Arrivals at the barriers of a stage: of its rows, and of its weights, with which their scales
// come if rows are not copied.
inline constexpr int kTokenArrivals = kTokenWarps * (kQuantizes ? 1 : 32);
inline constexpr int kWeightArrivals = 1 + (kQuantizes && kBlockScales ? 32 : 0);

inline constexpr int kScaleStages = kBlockScales ? kMaxStages : 1;
// Scales of rows come with each stage where they are of groups, and where the kernel finds them.
inline constexpr int kRowScaleStages = kQuantizes ? kMaxStages : kScaleStages;
// Scales of a block of packed channels: those of a gated weight, which alternate, are gate's and
// up's. Then a block is half of each.
inline constexpr int kAlternatingScales = kScaleChannels == 8 ? 1 : 2;
// Of the channels of a tile, which begins at a multiple of kPackedRows.
inline constexpr int kTileScales =
    kAlternatingScales *
    ceil_div(kChannels + kScaleChannels - std::min(kScaleChannels, kPackedRows), kScaleChannels);

// Whether the epilogue multiplies columns by scales: those of a thread are many, and loaded one by
// one behind the mainloop they would take longer than to store the results.
inline constexpr bool kStagesScales = kResultScales && kTokenRows;

struct alignas(1024) Storage {
  // Block scales of a stage: of its channels, and of its rows.
  alignas(16) float w_scales[kScaleStages][kUnits][kTileScales];
  alignas(16) float x_scales[kRowScaleStages][kUnits][kTokens];
  // Of the tile that each warp copies; -1 for those that do not exist.
  alignas(16) int32_t x_rows[kTokenWarps][kRowsAtOnce][kListedRows];
  // Scales of a tile's channels, in the packed order, where they are the MMA's columns: for each
  // warpgroup, which has rows of its own.
  float channel_scales[kStagesScales ? kConsumers : 1][kStagesScales ? kChannels : 2];
  uint64_t full[kMaxStages];         // of weights
  uint64_t full_tokens[kMaxStages];  // of rows of x
  uint64_t empty[kMaxStages];
  float row_scales[kQuantizes && kResultScales ? kTokens : 1];  // of the tile that is quantised
};
inline constexpr int kStorageBytes = (sizeof(Storage) + 1023) / 1024 * 1024;

// Derived on the host at launch.
struct Plan {
  static constexpr int token_rows = kTokens;  // of a stage
  int stages;
  int stage_bytes;
  int weight_bytes;
  int block_bytes;  // of a block of K of the tile's channels
  int x_row_bytes;  // of a row that waits to be quantised: as many elements as a tile's stages have
  int tile_channels;
  int channel_tiles;  // of an expert
  int expert_tiles;   // packed tiles of 16 channels of an expert
  int depth_steps;    // stages of a tile
  int width;          // channels of out
  int k_bytes;
  int aligned_out;  // two adjacent channels can be stored at once
  int vector_out;   // 8 adjacent channels of 16 bits can be, wherever 8 of them begin
  int pairs;        // 1: two CTAs are a cluster
};

__host__ __device__ constexpr int pairs_of(const Plan& plan) { return kPairs ? plan.pairs : 0; }

// Of the rows of a tile that wait to be quantised, in front of the ring.
__host__ __device__ constexpr int waiting_bytes(const Plan& plan) {
  return kQuantizes ? kTokens * plan.x_row_bytes : 0;
}

// A tile of rows of one expert and of its channels.
struct WorkTile {
  int expert, first_row, rows;
  int channel;  // the first, in the packed order
  bool shared;  // the CTAs of a pair have the same weights
};

// The tiles of a CTA, or of a pair: each `stride`-th of `count`, from `first` on.
struct Walk {
  int first, stride, count;
};

__device__ __forceinline__ Walk walk_of(const Plan& plan, int tiles) {
  const int pairs = pairs_of(plan);
  return {static_cast<int>(blockIdx.x) >> pairs, static_cast<int>(gridDim.x) >> pairs,
          ((tiles + pairs) >> pairs) * plan.channel_tiles};
}

__device__ __forceinline__ WorkTile work_tile_at(const MoeLinearParams& params, const Plan& plan,
                                                 int tiles, int index) {
  // Tiles of rows first: those of one expert, which read the same weights, run side by side.
  const int pairs = pairs_of(plan), groups = (tiles + pairs) >> pairs;
  const int channel_tile = index / groups;
  const int channel = channel_tile * plan.tile_channels;
  const int first = (index - channel_tile * groups) << pairs;
  const int* const entries = params.tiles + int64_t(first) * 4;
  if (pairs == 0) {
    return {entries[0], entries[1], entries[2] - entries[1], channel, false};
  }
  // A last tile that has no other beside it has one without rows.
  const bool alone = first + 1 == tiles;
  const bool shared = alone || entries[0] == entries[4];
  const bool second = cluster_rank() != 0;
  const int* const mine = entries + (second && !alone ? 4 : 0);
  return {mine[0], mine[1], second && alone ? 0 : mine[2] - mine[1], channel, shared};
}

// Calls visit(tile) for the tiles of this CTA.
template <class Visit>
__device__ __forceinline__ void for_each_tile(const MoeLinearParams& params, const Plan& plan,
                                              int tiles, const Visit& visit) {
  const Walk walk = walk_of(plan, tiles);
  for (int index = walk.first; index < walk.count; index += walk.stride) {
    visit(work_tile_at(params, plan, tiles, index));
  }
}

}  // namespace ostinato::moe
