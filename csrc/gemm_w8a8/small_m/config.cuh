// Compile-time configuration of one small-M GEMM, from its -D macros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/sizes.cuh"
#include "gemm_w8a8/packed.h"
#include "mma.cuh"

// -DOSTINATO_OUTPUT=__nv_bfloat16|__half|float
// -DOSTINATO_TOKENS=8|16|32|64            most rows of x
// -DOSTINATO_TOKEN_WARPS=1|2|4            warps that divide the tokens; the others divide K
// -DOSTINATO_ROW_TILES=n                  weight tiles (16 rows) per pass over K
// -DOSTINATO_X_SLOTS=n                    chunks of x that a warp holds in registers
// -DOSTINATO_PAIRED_TILES=0|1             1: the two tiles of a pass are gates and their ups

namespace ostinato::small_m {

using Output = OSTINATO_OUTPUT;

inline constexpr int kWarpBlocks = 2;  // per chunk and warp: a whole 128-byte line of every token
inline constexpr int kWarpDepth = kWarpBlocks * kPackedDepth;

inline constexpr int kMmaWarps = 8;
inline constexpr int kMmaThreads = kMmaWarps * 32;
inline constexpr int kThreads = kMmaThreads + 32;  // plus one warp that issues the copies

inline constexpr int kTokens = OSTINATO_TOKENS;
inline constexpr int kTokenWarps = OSTINATO_TOKEN_WARPS;
inline constexpr int kDepthWarps = kMmaWarps / kTokenWarps;
inline constexpr int kTokenTiles = kTokens / 8 / kTokenWarps;  // of 8 tokens, per warp
inline constexpr int kRowTiles = OSTINATO_ROW_TILES;
inline constexpr int kRows = kRowTiles * kPackedRows;
// MMAs into the same accumulator are serialised. If few accumulators would leave the tensor core
// idle, even and odd blocks have separate ones.
inline constexpr int kChains = kRowTiles * kTokenTiles <= 4 ? kWarpBlocks : 1;
inline constexpr int kXSlots = OSTINATO_X_SLOTS;
// The first half of the channels are gates, the second half their ups.
inline constexpr bool kPairedTiles = OSTINATO_PAIRED_TILES != 0;
inline constexpr int kTilesOfUnit = kPairedTiles ? 2 : 1;  // that one CTA has together
static_assert(!kPairedTiles || kRowTiles == 2, "a pass is one pair of tiles");
static_assert(kTokens % (8 * kTokenWarps) == 0, "every token warp needs whole tiles of 8 tokens");
static_assert(kMmaWarps % kTokenWarps == 0, "token warps must divide the MMA warps");
static_assert(kRows <= kMmaThreads, "the epilogue gives each thread one weight row");

// A stage of the ring is a chunk of K of kRowTiles weight tiles. Each half of a tile's K has its
// own copy and barrier, so that few bytes remain to be multiplied when the last ones land.
inline constexpr int kChunkBlocks = kDepthWarps * kWarpBlocks;
inline constexpr int kChunkDepth = kChunkBlocks * kPackedDepth;
inline constexpr int kChunkTileBytes = kChunkBlocks * kPackedBlockBytes;
inline constexpr int kStageBytes = kRowTiles * kChunkTileBytes;
inline constexpr int kHalves = 2;
inline constexpr int kHalfBlocks = kChunkBlocks / kHalves;
static_assert(kDepthWarps % kHalves == 0, "a warp's blocks must be in one half");

// Sums of each depth warp, [token][row]. The pitch avoids bank conflicts of a warp's stores.
inline constexpr int kPartialPitch = kRows + 8;
inline constexpr int kPartialBytes = kDepthWarps * kTokens * kPartialPitch * 4;

inline constexpr int kSmemLimit = 227 * 1024;
// scales, zero points, barriers
inline constexpr int kFixedBytes = kPartialBytes + kTokens * 8 + 1024;
// Shared memory reduces L1, where all loads of x need a line at the same time.
inline constexpr int kRingLimit = 144 * 1024;
// Bytes in flight until x is requested: little more than keeps memory busy, since x, and what the
// preceding kernels read, queue behind them.
inline constexpr int kPrefillBytes = 32 * 1024;
inline constexpr int kSmemForRing = kSmemLimit - kFixedBytes;
inline constexpr int kStages =
    (kSmemForRing < kRingLimit ? kSmemForRing : kRingLimit) / kStageBytes;
inline constexpr int kWantedPrefill = ceil_div(kPrefillBytes, kStageBytes);
inline constexpr int kPrefillStages = kWantedPrefill < kStages ? kWantedPrefill : kStages;
static_assert(kStages >= 2, "the ring needs two stages: fewer row tiles or tokens");

// Named barriers.
inline constexpr int kMmaDone = 1;
inline constexpr int kInitialized = 2;

struct alignas(128) SharedStorage {
  uint8_t ring[kStages][kStageBytes];
  int32_t partial[kDepthWarps][kTokens][kPartialPitch];
  float x_scale[kTokens];
  int32_t x_zero_point[kTokens];
  uint64_t full[kStages][kRowTiles][kHalves];
  uint64_t empty[kStages];
  uint64_t x_requested;
};
static_assert(sizeof(SharedStorage) <= kSmemLimit, "shared memory of one CTA per SM");

}  // namespace ostinato::small_m
