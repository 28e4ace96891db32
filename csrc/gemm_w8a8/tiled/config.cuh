// Compile-time configuration of one tiled GEMM, from its -D macros, and its shared-memory layout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/debug.cuh"
#include "common/registers.cuh"
#include "gemm_w8a8/packed.h"
#include "gemm_w8a8/params.h"
#include "scale_boxes.cuh"

// -DOSTINATO_OPERAND=int8|e4m3|bf16|fp16   x and w
// -DOSTINATO_OUT=bf16|fp16|fp32     out and bias
// -DOSTINATO_CHANNELS=64...256      most channels of a tile
// -DOSTINATO_TOKENS=8|16|32|64|128|256   most tokens of a tile
// -DOSTINATO_PINGPONG=0|1           1: two consumer warpgroups alternate, each with its own tile
// -DOSTINATO_FAST_ACCUM=0|1         e4m3 only. 1: accumulate in the tensor cores (about 13 fraction
//                                   bits); 0: promote to fp32 accumulators every 128 products
// -DOSTINATO_BLOCK_SCALES=0|1       e4m3 only. 1: scales of 128 of K, of a token and of channels;
//                                   sums of 128 products are scaled and added in fp32
// -DOSTINATO_SCALE_CHANNELS=8|128   channels that share a block scale

namespace ostinato::tiled {

namespace dtype {
using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;
}  // namespace dtype
enum class OperandType { int8, e4m3, bf16, fp16 };

using Output = dtype::OSTINATO_OUT;
inline constexpr OperandType kOperandType = OperandType::OSTINATO_OPERAND;
inline constexpr bool kInt8 = kOperandType == OperandType::int8;
inline constexpr bool k16Bit =
    kOperandType == OperandType::bf16 || kOperandType == OperandType::fp16;
// K is counted in bytes wherever the launch has converted it: an MMA multiplies 32 bytes of K of
// any operands in the same time.
inline constexpr int kOperandBytes = k16Bit ? 2 : 1;
inline constexpr bool kFastAccum = OSTINATO_FAST_ACCUM;
inline constexpr bool kPromote = kOperandType == OperandType::e4m3 && !kFastAccum;
static_assert(!kFastAccum || kOperandType == OperandType::e4m3,
              "only FP8 sums lose bits in the tensor cores");
inline constexpr bool kBlockScales = OSTINATO_BLOCK_SCALES;
static_assert(!kBlockScales || kPromote, "block scales belong to FP8 sums of 128 products");
inline constexpr int kScaleChannels = OSTINATO_SCALE_CHANNELS;
static_assert(kScaleChannels == 8 || kScaleChannels == 128, "8 channels, or a block of them");
// Whether results are multiplied by a scale of the token and one of the channel.
inline constexpr bool kResultScales = !k16Bit && !kBlockScales;

inline constexpr bool kPingPong = OSTINATO_PINGPONG;
// Tokens or channels are the MMA's 64 rows; the others are its columns, whose number is flexible.
// Tokens as rows allow any number of channels per tile. Channels are rows (swap-AB) if few tokens
// would leave rows empty, and if a tile should be as large as possible or be stored while the next
// one is accumulated: there the epilogue that transposes results and stores them by TMA takes less
// power.
#define OSTINATO_TOKEN_ROWS \
  ((OSTINATO_TOKENS == 64 || OSTINATO_TOKENS == 128) && !OSTINATO_PINGPONG)
inline constexpr bool kTokenRows = OSTINATO_TOKEN_ROWS;
// Small M: a thread stores its results directly, and one warpgroup suffices for all channels of a
// tile, since it waits for weights.
#define OSTINATO_SMALL_M (OSTINATO_TOKENS <= 16)
inline constexpr bool kSmallM = OSTINATO_SMALL_M;

inline constexpr int kChannels = OSTINATO_CHANNELS;
inline constexpr int kTokens = OSTINATO_TOKENS;
inline constexpr int kTileRows = kTokenRows ? kTokens : kChannels;
inline constexpr int kTileColumns = kTokenRows ? kChannels : kTokens;
inline constexpr int kMmaRows = 64;
inline constexpr int kMmaDepth = 32;    // bytes
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kConsumers = kPingPong || (kTileRows > kMmaRows && !kSmallM) ? 2 : 1;
inline constexpr int kSharers = kPingPong ? 1 : kConsumers;  // warpgroups that share a tile
__device__ __forceinline__ int warpgroup_in_tile(int warpgroup) {
  return kPingPong ? 0 : warpgroup;
}
inline constexpr int kBlocks = kTileRows / (kMmaRows * kSharers);  // of 64 rows, per warpgroup
inline constexpr int kSums = kTileColumns / 2;                     // per thread and block
static_assert(kTileRows == 64 || kTileRows == 128, "one warpgroup of 64 rows, or two");
static_assert(kTileColumns == 8 || (kTileColumns % 16 == 0 && kTileColumns <= 256),
              "an INT8 MMA has 8 columns, or a multiple of 16");

// One consumer leaves enough registers: its producers are two warps. Otherwise the producers are a
// warpgroup that gives up registers (setmaxnreg).
inline constexpr int kProducerThreads = kConsumers == 1 ? 64 : kWarpgroup;
inline constexpr int kThreads = kConsumers * kWarpgroup + kProducerThreads;

// A stage of the ring holds kStageDepth bytes of K of the tile's tokens and channels. For small
// tiles that is two or four units of 128, since each stage costs a round of barriers.
inline constexpr int kUnitDepth = 128;
inline constexpr int kUnits = kChannels + kTokens <= 80 ? 4 : kChannels + kTokens <= 160 ? 2 : 1;
inline constexpr int kStageDepth = kUnits * kUnitDepth;
inline constexpr int kUnitBlocks = kUnitDepth / kPackedDepth;
inline constexpr int kStageBlocks = kUnits * kUnitBlocks;
// Block scales have a ring of their own: without this limit it would take the room of a stage.
inline constexpr int kMaxStages = kBlockScales && kUnits == 1 ? 8 : 16;
// With block scales, products are scaled piece by piece, while other MMAs run: a piece is a unit,
// or half of its columns where the sums of all would not fit.
#define OSTINATO_HALF_PIECES                                             \
  (OSTINATO_BLOCK_SCALES && OSTINATO_CHANNELS + OSTINATO_TOKENS > 160 && \
   (OSTINATO_TOKENS != 128 || OSTINATO_CHANNELS > 192))
inline constexpr int kColumnParts = OSTINATO_HALF_PIECES ? 2 : 1;
// Whether rows are in registers for both halves; beside the sums of wide tiles they do not fit.
#define OSTINATO_ROWS_IN_REGISTERS (OSTINATO_HALF_PIECES && OSTINATO_CHANNELS <= 160)
inline constexpr bool kRowsInRegisters = OSTINATO_ROWS_IN_REGISTERS;
inline constexpr int kPieceColumns = kTileColumns / kColumnParts;
inline constexpr int kPieceSums = kPieceColumns / 2;  // per thread and block
inline constexpr int kPieces = kUnits * kColumnParts;
// Pieces whose products are in registers at once. Of two warpgroups that is one: while one of them
// scales it, the MMAs of the other run.
inline constexpr int kPiecesAtOnce = OSTINATO_TOKENS == 128 ? 1 : kPieces;
// Of these, so many follow one another without a branch, their addresses computed ahead.
inline constexpr int kUnrolledStages = 8 / kPieces;
static_assert(!kBlockScales || kPiecesAtOnce > 1 || kConsumers > 1,
              "no MMAs run while a piece is scaled");
// Stages whose pieces follow one another without a wait for all of them.
inline constexpr int kRunStages = kUnits == 4 ? 2 : 4;
// Sums in registers: those of the tile and, where they are added to these, those of 128 products.
inline constexpr int kProductSums = kBlockScales ? kPiecesAtOnce * kPieceSums
                                    : kPromote   ? kSums
                                                 : 0;
static_assert(kBlocks * (kSums + kProductSums) <= (kBlockScales ? 192 : 128),
              "sums must fit in the registers");
static_assert(!kBlockScales || !kPingPong, "two sets of sums of a ping-pong tile do not fit");
// Weights are loaded before x, while the preceding kernel runs. With small tiles, launches are
// short, and the whole ring is filled, but with at most this many bytes in flight: x, and what the
// preceding kernel reads, queue behind them.
inline constexpr bool kThrottled = kTokens <= 64;
inline constexpr int kThrottledBytes = 32 * 1024;
// Otherwise: bytes of weights loaded before x. More would delay x, which queues behind them.
inline constexpr int kPrefillBytes = 32 * 1024;
// The swizzle repeats after groups of 8 rows.
inline constexpr int kGroupRows = 8;

// With channels as rows (swap-AB), the epilogue transposes a chunk of tokens at a time from the MMA
// layout into rows of out, 64 channels each. There are several chunk buffers, since TMA reads one
// while the next is written. A row is stored in strips as wide as TMA's widest swizzle.
inline constexpr int kChunkTokens = kTokens % 64 == 0 ? 32 : 16;
inline constexpr int kTileChunks = kTileColumns / kChunkTokens;
inline constexpr int kChunks = 3;
inline constexpr int kStripBytes = 128;
inline constexpr int kStrips = kMmaRows * sizeof(Output) / kStripBytes;
// The largest tile is stored while the next one is accumulated: its 16-bit results fit into
// registers beside the accumulators. Ping-pong uses another warpgroup for that.
inline constexpr bool kDeferStores =
    !kTokenRows && !kPingPong && sizeof(Output) == 2 && kBlocks == 1 && kTileColumns == 256;
// With tokens as rows, the epilogue stores 16 channels of a token at a time.
inline constexpr int kStoredChannels = 16;
// Whether the epilogue can compute the argmax of slices of each row. Not for small M, where it
// costs more than sampling saves; not for 16-bit outputs, which are not logits; not for ping-pong,
// which is for many tokens and would spill.
inline constexpr bool kFindsArgmax = sizeof(Output) == 4 && !kSmallM && !kPingPong;
// Two CTAs can share the K of a tile if each is left with whole multiples of these columns.
inline constexpr int kStoredColumns = kTokenRows ? kStoredChannels : kChunkTokens;
inline constexpr bool kCanSplit = !kPingPong && !kSmallM && kTileColumns / 2 % kStoredColumns == 0;

struct SwapAbStorage {
  uint8_t chunk[kConsumers][kChunks][kStrips][kChunkTokens][kStripBytes];
  float x_scale[kConsumers][kTokens];
  int32_t x_zero_point[kConsumers][kTokens];
};

struct NoStorage {};

// Block scales of a stage, a box of kCount for each unit; TMA writes to multiples of 128 bytes.
// A tile begins at a multiple of kPackedRows, so that it may begin within a block of channels.
inline constexpr int kTileScales =
    ceil_div(kChannels + kScaleChannels - std::min(kScaleChannels, kPackedRows), kScaleChannels);
inline constexpr int kWeightScales = scale_box(kTileScales);
inline constexpr int kTokenScales = scale_box(kTokens);
template <int kCount>
struct alignas(128) StageScales {
  static_assert(kCount * sizeof(float) % kTmaBytes == 0, "a row of a box has whole 16 bytes");
  float of[kUnits][kCount];
};
struct BlockScaleStorage {
  StageScales<kWeightScales> w_scales[kMaxStages];
  StageScales<kTokenScales> x_scales[kMaxStages];
};
struct NoScaleStorage {};
inline constexpr int kWeightScaleBytes = kBlockScales ? kUnits * kWeightScales * sizeof(float) : 0;
inline constexpr int kTokenScaleBytes = kBlockScales ? kUnits * kTokenScales * sizeof(float) : 0;

struct DirectStorage {
  float w_scale[kConsumers][kChannels];
  float bias[kConsumers][kChannels];
  int32_t w_sum[kConsumers][kChannels];
};

// Arrivals of a consumer warpgroup that release a stage to one CTA.
inline constexpr int kReleases = kBlockScales ? kWarpgroup / 32 : 1;

struct alignas(1024) FixedStorage
    : std::conditional_t<kBlockScales, BlockScaleStorage, NoScaleStorage> {
  std::conditional_t<kTokenRows, DirectStorage,
                     std::conditional_t<kSmallM, NoStorage, SwapAbStorage>>
      epilogue;
  uint64_t full[kMaxStages];         // of weights and tokens; of weights alone if kThrottled
  uint64_t full_tokens[kMaxStages];  // if kThrottled
  uint64_t empty[kMaxStages];
  uint64_t turn[2];    // ping-pong: the warpgroup may issue MMAs
  uint64_t prefilled;  // the first tokens have been requested
};

// Accumulators of half the tile's columns, in fp32 or int32.
inline constexpr int kClusterReduceBytes = kChannels * kTokens / 2 * 4;

inline constexpr int kSmemLimit = 227 * 1024;
inline constexpr int kRingOffset = (sizeof(FixedStorage) + 1023) / 1024 * 1024;

}  // namespace ostinato::tiled
