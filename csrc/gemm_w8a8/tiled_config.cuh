// The shape of one compiled tiled GEMM, from its -D macros, and its use of shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/debug.cuh"
#include "common/params.h"
#include "common/registers.cuh"
#include "packed.h"

// -DOSTINATO_OPERAND=int8|e4m3      x and w
// -DOSTINATO_OUT=bf16|fp16|fp32     out and bias
// -DOSTINATO_CHANNELS=64|128|256    most channels of a tile: the MMA's rows
// -DOSTINATO_TOKENS=16...256        most tokens of a tile: the MMA's columns
// -DOSTINATO_FAST_ACCUM=0|1         e4m3 only. 1: sums stay in the tensor cores (about 13 fraction
//                                   bits); 0: they are added in fp32 every 128 products
namespace ostinato::tiled {

namespace dtype {
using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;
enum Operand { int8, e4m3 };
}  // namespace dtype

using Output = dtype::OSTINATO_OUT;
inline constexpr bool kInt8 = dtype::OSTINATO_OPERAND == dtype::int8;
inline constexpr bool kFastAccum = OSTINATO_FAST_ACCUM;
inline constexpr bool kPromote = !kInt8 && !kFastAccum;
static_assert(!(kInt8 && kFastAccum), "INT8 sums are exact: there is nothing to accumulate fast");

inline constexpr int kChannels = OSTINATO_CHANNELS;
inline constexpr int kTokens = OSTINATO_TOKENS;
inline constexpr int kMmaRows = 64;
inline constexpr int kMmaDepth = 32;
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kConsumers = kChannels > kMmaRows ? 2 : 1;
inline constexpr int kBlocks = kChannels / (kMmaRows * kConsumers);  // of 64 channels, a warpgroup
inline constexpr int kSums = kTokens / 2;                            // per thread and block
// A product waits for the one before it that has the same sums. Where few columns leave the tensor
// core idle meanwhile, two sets of sums take turns.
inline constexpr int kChains = kTokens <= 32 && !kPromote ? 2 : 1;
static_assert(kChannels == 64 || kChannels == 128 || kChannels == 256,
              "one warpgroup of 64 channels, or two of 64 or 128");
static_assert(kTokens % 16 == 0 && kTokens <= 256, "an INT8 MMA has a multiple of 16 columns");
static_assert(kBlocks * kSums * (kPromote ? 2 : 1) <= 128, "sums must fit in the registers");

// One consumer leaves registers for all: its producers are two warps. Otherwise a warpgroup gives
// its registers away.
inline constexpr int kProducerThreads = kConsumers == 1 ? 64 : kWarpgroup;
inline constexpr int kThreads = kConsumers * kWarpgroup + kProducerThreads;

// A stage of the ring holds this much of K of the tile's tokens and channels. Small tiles take two
// units of 128, since each stage costs a round of barriers.
inline constexpr int kUnitDepth = 128;
inline constexpr int kUnits = kChannels + kTokens <= 128 ? 2 : 1;
inline constexpr int kStageDepth = kUnits * kUnitDepth;
inline constexpr int kUnitBlocks = kUnitDepth / kPackedDepth;
inline constexpr int kStageBlocks = kUnits * kUnitBlocks;
inline constexpr int kMaxStages = 16;
// Weights that are asked for before x: deeper is not better, since x waits behind them.
inline constexpr int kPrefillBytes = (kTokens <= 32 ? 192 : kTokens <= 64 ? 64 : 32) * 1024;
// x is swizzled in groups of 8 tokens.
inline constexpr int kTokenGroup = 8;

// The epilogue turns a chunk of tokens at a time from the MMA's layout into rows of out, of 64
// channels. Several take turns, since TMA reads one while the next is written. A row is stored in
// pieces as wide as TMA's widest swizzle.
inline constexpr int kChunkTokens = kTokens % 64 == 0 ? 32 : 16;
inline constexpr int kChunks = 3;
inline constexpr int kPieceBytes = 128;
inline constexpr int kPieces = kMmaRows * sizeof(Output) / kPieceBytes;
// Two CTAs can share the K of a tile where each is left with a whole chunk.
inline constexpr bool kCanSplit = kTokens / 2 % kChunkTokens == 0;

struct alignas(1024) FixedStorage {
  uint8_t chunk[kConsumers][kChunks][kPieces][kChunkTokens][kPieceBytes];
  float x_scale[kConsumers][kTokens];
  int32_t x_zero_point[kConsumers][kTokens];
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  uint64_t prefilled;  // the tokens' turn has come
};

// Sums of half the tile's tokens, in fp32 or int32.
inline constexpr int kExchangeBytes = kChannels * kTokens / 2 * 4;

inline constexpr int kSmemLimit = 227 * 1024;
inline constexpr int kRingOffset = (sizeof(FixedStorage) + 1023) / 1024 * 1024;

}  // namespace ostinato::tiled
