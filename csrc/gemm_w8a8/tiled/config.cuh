// The shape of one compiled tiled GEMM, from its -D macros, and its use of shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/debug.cuh"
#include "common/registers.cuh"
#include "gemm_w8a8/packed.h"
#include "gemm_w8a8/params.h"

// -DOSTINATO_OPERAND=int8|e4m3      x and w
// -DOSTINATO_OUT=bf16|fp16|fp32     out and bias
// -DOSTINATO_CHANNELS=64...256      most channels of a tile
// -DOSTINATO_TOKENS=8|16|32|64|128|256   most tokens of a tile
// -DOSTINATO_PINGPONG=0|1           1: two warpgroups with a tile each take turns
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

inline constexpr bool kPingPong = OSTINATO_PINGPONG;
// What feeds the MMA's 64 rows; the other feeds its columns, of which there may be as many as are
// wanted. Tokens, so that a tile has any number of channels; but channels where few tokens would
// leave rows empty, and where a tile is to be as large as it can or stored while another is summed:
// there the epilogue that turns results and stores them by TMA takes less power.
#define OSTINATO_TOKEN_ROWS \
  ((OSTINATO_TOKENS == 64 || OSTINATO_TOKENS == 128) && !OSTINATO_PINGPONG)
inline constexpr bool kTokenRows = OSTINATO_TOKEN_ROWS;
// So few tokens that a thread's results are stored as they are, and that one warpgroup has time for
// all of a tile's channels: it waits for weights.
#define OSTINATO_SMALL_M (OSTINATO_TOKENS <= 16)
inline constexpr bool kSmallM = OSTINATO_SMALL_M;

inline constexpr int kChannels = OSTINATO_CHANNELS;
inline constexpr int kTokens = OSTINATO_TOKENS;
inline constexpr int kTileRows = kTokenRows ? kTokens : kChannels;
inline constexpr int kTileColumns = kTokenRows ? kChannels : kTokens;
inline constexpr int kMmaRows = 64;
inline constexpr int kMmaDepth = 32;
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kConsumers = kPingPong || (kTileRows > kMmaRows && !kSmallM) ? 2 : 1;
inline constexpr int kSharers = kPingPong ? 1 : kConsumers;  // warpgroups of a tile
__device__ __forceinline__ int part_of_tile(int warpgroup) { return kPingPong ? 0 : warpgroup; }
inline constexpr int kBlocks = kTileRows / (kMmaRows * kSharers);  // of 64 rows, a warpgroup
inline constexpr int kSums = kTileColumns / 2;                     // per thread and block
static_assert(kTileRows == 64 || kTileRows == 128, "one warpgroup of 64 rows, or two");
static_assert(kTileColumns == 8 || (kTileColumns % 16 == 0 && kTileColumns <= 256),
              "an INT8 MMA has 8 columns, or a multiple of 16");
static_assert(kBlocks * kSums * (kPromote ? 2 : 1) <= 128, "sums must fit in the registers");

// One consumer leaves registers for all: its producers are two warps. Otherwise a warpgroup gives
// its registers away.
inline constexpr int kProducerThreads = kConsumers == 1 ? 64 : kWarpgroup;
inline constexpr int kThreads = kConsumers * kWarpgroup + kProducerThreads;

// A stage of the ring holds this much of K of the tile's tokens and channels. Small tiles take two
// or four units of 128, since each stage costs a round of barriers.
inline constexpr int kUnitDepth = 128;
inline constexpr int kUnits = kChannels + kTokens <= 80 ? 4 : kChannels + kTokens <= 160 ? 2 : 1;
inline constexpr int kStageDepth = kUnits * kUnitDepth;
inline constexpr int kUnitBlocks = kUnitDepth / kPackedDepth;
inline constexpr int kStageBlocks = kUnits * kUnitBlocks;
inline constexpr int kMaxStages = 16;
// Weights are asked for before x. Where tiles are small, launches are short and the kernels before
// them, too: the whole ring is filled meanwhile, but with no more than this in flight, since x, and
// what the kernel that makes x reads, are served after it.
inline constexpr bool kThrottled = kTokens <= 64;
inline constexpr int kThrottledBytes = 32 * 1024;
// Otherwise: weights that are asked for before x. More is not better, since x waits behind them.
inline constexpr int kPrefillBytes = 32 * 1024;
// Shared memory is swizzled in groups of 8 rows.
inline constexpr int kGroupRows = 8;

// Where channels are rows, the epilogue turns a chunk of tokens at a time from the MMA's layout
// into rows of out, of 64 channels. Several take turns, since TMA reads one while the next is
// written. A row is stored in pieces as wide as TMA's widest swizzle.
inline constexpr int kChunkTokens = kTokens % 64 == 0 ? 32 : 16;
inline constexpr int kTileChunks = kTileColumns / kChunkTokens;
inline constexpr int kChunks = 3;
inline constexpr int kPieceBytes = 128;
inline constexpr int kPieces = kMmaRows * sizeof(Output) / kPieceBytes;
// The largest tile is stored while the next one is summed: its results, two to a register, fit
// beside the sums. Ping-pong has another warpgroup for that.
inline constexpr bool kDeferStores =
    !kTokenRows && !kPingPong && sizeof(Output) == 2 && kBlocks == 1 && kTileColumns == 256;
// Where tokens are, it stores 16 channels of a token at a time.
inline constexpr int kStoredChannels = 16;
// Whether the epilogue can find the best of each row's part: of few tokens that costs more than the
// sampling saves, 16 bits are no logits, and ping-pong, which would spill, is for many tokens.
inline constexpr bool kFindsArgmax = sizeof(Output) == 4 && !kSmallM && !kPingPong;
// Two CTAs can share the K of a tile where each is left with whole ones of these.
inline constexpr int kStoredColumns = kTokenRows ? kStoredChannels : kChunkTokens;
inline constexpr bool kCanSplit = !kPingPong && !kSmallM && kTileColumns / 2 % kStoredColumns == 0;

struct SwapAbStorage {
  uint8_t chunk[kConsumers][kChunks][kPieces][kChunkTokens][kPieceBytes];
  float x_scale[kConsumers][kTokens];
  int32_t x_zero_point[kConsumers][kTokens];
};

struct NoStorage {};

struct DirectStorage {
  float w_scale[kConsumers][kChannels];
  float bias[kConsumers][kChannels];
  int32_t w_sum[kConsumers][kChannels];
};

struct alignas(1024) FixedStorage {
  std::conditional_t<kTokenRows, DirectStorage,
                     std::conditional_t<kSmallM, NoStorage, SwapAbStorage>>
      epilogue;
  uint64_t full[kMaxStages];         // of weights and tokens; of weights alone if kThrottled
  uint64_t full_tokens[kMaxStages];  // if kThrottled
  uint64_t empty[kMaxStages];
  uint64_t turn[2];    // ping-pong: the warpgroup may multiply
  uint64_t prefilled;  // the tokens' turn has come
};

// Sums of half the tile's columns, in fp32 or int32.
inline constexpr int kClusterReduceBytes = kChannels * kTokens / 2 * 4;

inline constexpr int kSmemLimit = 227 * 1024;
inline constexpr int kRingOffset = (sizeof(FixedStorage) + 1023) / 1024 * 1024;

}  // namespace ostinato::tiled
