// Compile-time configuration of one grouped GEMM: that of a tiled GEMM with the same macros, and
// its own shared memory.
//
// -DOSTINATO_QUANTIZES=0|1  1: x has 16 bits, and the kernel quantises it to operands of 8
// -DOSTINATO_X=bf16|fp16    of x, if OSTINATO_QUANTIZES
#pragma once

#include <algorithm>

#include "common/sizes.cuh"
#include "gemm_w8a8/tiled/config.cuh"
#include "params.h"

namespace ostinato::moe {

using namespace tiled;

static_assert(!kPingPong, "the warpgroups of a grouped GEMM share their tiles");

// One warp copies weights, the others of the producers' warpgroup gather rows of x.
inline constexpr int kTokenWarps = 3;
inline constexpr int kCtaThreads = (kConsumers + 1) * kWarpgroup;

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
  int32_t x_rows[kTokenWarps][kTokens];  // of the tile that each warp copies
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
};

// Of the rows of a tile that wait to be quantised, in front of the ring.
__host__ __device__ constexpr int waiting_bytes(const Plan& plan) {
  return kQuantizes ? kTokens * plan.x_row_bytes : 0;
}

// A tile of rows of one expert and of its channels.
struct WorkTile {
  int expert, first_row, rows;
  int channel;  // the first, in the packed order
};

__device__ __forceinline__ WorkTile work_tile_at(const MoeLinearParams& params, const Plan& plan,
                                                 int tiles, int index) {
  // Tiles of rows first: those of one expert, which read the same weights, run side by side.
  const int channel_tile = index / tiles;
  const int* const entry = params.tiles + int64_t(index - channel_tile * tiles) * 4;
  return {entry[0], entry[1], entry[2] - entry[1], channel_tile * plan.tile_channels};
}

}  // namespace ostinato::moe
