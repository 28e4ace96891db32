// Compile-time configuration of one prefill kernel, from its -D macros, and its shared-memory
// sizes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/debug.cuh"
#include "common/registers.cuh"
#include "common/sizes.cuh"
#include "params.h"

// -DOSTINATO_HEAD_DIM=n     of queries and keys, a multiple of 16
// -DOSTINATO_VALUE_DIM=n    of values and output, a multiple of 16
// -DOSTINATO_TYPE=__nv_bfloat16|__half|__nv_fp8_e4m3  of queries, keys, values and weights
// -DOSTINATO_OUT=__nv_bfloat16|__half                 of the output
// -DOSTINATO_BYTES=0|1       1: elements have 8 bits
// -DOSTINATO_KEYS=n         keys per tile, a multiple of the k of an MMA: 16, or 32 with 8 bits
// -DOSTINATO_CONSUMERS=2|3  consumer warpgroups, each with 64 rows
// -DOSTINATO_SOURCE=Packed|Pages|Slots   layout of keys and values: packed rows; pages of a
//                           multiple of 16 tokens (TMA); pages of any size (cp.async)

namespace ostinato::prefill {

using Type = OSTINATO_TYPE;
using OutType = OSTINATO_OUT;
inline constexpr int kElement = sizeof(Type);
inline constexpr bool kFp8 = OSTINATO_BYTES != 0;
static_assert(kFp8 == (kElement == 1), "the macros agree on the elements");
using Params = PrefillParams;

enum class Source { Packed, Pages, Slots };
inline constexpr Source kSource = Source::OSTINATO_SOURCE;

inline constexpr int kDim = OSTINATO_HEAD_DIM;
inline constexpr int kValueDim = OSTINATO_VALUE_DIM;
inline constexpr int kKeys = OSTINATO_KEYS;
inline constexpr int kConsumers = OSTINATO_CONSUMERS;
inline constexpr int kMmaDepth = 32 / kElement;  // k of one MMA
static_assert(kDim % kMmaDepth == 0 && kDim <= 256 && kValueDim % 16 == 0 && kValueDim <= 256,
              "an MMA takes some of the head dim, and has at most 256 columns");
static_assert(kKeys % kMmaDepth == 0 && kKeys >= 16 && kKeys <= (kFp8 ? 128 : 256),
              "an MMA takes some keys of values; 8-bit values lie in rows of up to 128 keys");
static_assert(!kFp8 || (kSource == Source::Packed &&
                        (kValueDim == 64 || kValueDim == 128 || kValueDim == 256)),
              "8-bit values are packed, of 64, 128 or 256 columns");
static_assert(kConsumers == 2 || kConsumers == 3, "two or three warpgroups multiply");

// A warpgroup has 64 rows: queries of one head, or of several heads of a group (packed GQA).
inline constexpr int kRows = 64;
inline constexpr int kWarpgroup = 128;  // threads
// If a work tile has more queries than a tile has keys, its last tiles may be masked for a whole
// warpgroup, which then skips them.
inline constexpr bool kSkipsTiles = kConsumers * kRows > kKeys;
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
inline constexpr int kConsumerThreads = kConsumers * kWarpgroup;
inline constexpr int kScores = kKeys / 2;       // per thread, in two rows
inline constexpr int kOutputs = kValueDim / 2;  // likewise
inline constexpr int kDimSteps = kDim / kMmaDepth;
inline constexpr int kKeySteps = kKeys / kMmaDepth;
// FP8 products of a tile's weights and values are added to the output in fp32 if registers have
// room for two sets of accumulators (consumer_fp8.cuh). Otherwise the MMAs accumulate kSumTiles
// tiles, which are then promoted in global memory (promote_gmem.cuh). A macro, since asm that names
// its registers depends on it.
#define OSTINATO_PROMOTES_TO_GMEM \
  (OSTINATO_BYTES != 0 &&         \
   (OSTINATO_VALUE_DIM == 256 || (OSTINATO_VALUE_DIM == 128 && OSTINATO_CONSUMERS == 3)))
inline constexpr bool kPromotesToGmem = OSTINATO_PROMOTES_TO_GMEM;
// Tiles that the tensor cores accumulate, and slices of the output, one of which is promoted with
// each tile. Fewer tiles lose less precision and are slower (docs/notebooks/prefill.md).
inline constexpr int kSumTiles = 16;
// The workspace: counters, and each CTA's promoted sums.
inline constexpr int kCounterBytes = kPromotesToGmem ? 256 : 8;
inline constexpr int kPromotionBytes = kPromotesToGmem ? kOutputs * 4 * kConsumerThreads : 0;

// With three consumer warpgroups and head dims up to 64, consumers can give up registers to warps
// that copy pages.
struct Registers {
  static constexpr bool kSpares =
      kSource == Source::Pages && kConsumers == 3 && kOutputs <= 32 && !kDebugPrint;
  static constexpr RegisterSplit kSplit =
      kSpares ? RegisterSplit{56, 152} : RegisterTable<kConsumers, kDebugPrint>::kSplit;
};
static_assert(fits(Registers::kSplit, kConsumers), "the split needs more than the launch has");
static_assert(kScores + kKeySteps * 4 + kOutputs +
                      (kFp8 ? (kPromotesToGmem ? 0 : kOutputs) + 20 : 32) <=
                  Registers::kSplit.consumer,
              "scores, weights and outputs must fit in the registers");

// Shared-memory layout of a matrix: strips of 128 bytes of each row, with TMA's 128-byte swizzle,
// which repeats every 1024 bytes.
inline constexpr int kStripBytes = 128;
inline constexpr int kStripDim = kStripBytes / kElement;
inline constexpr int kStrips = ceil_div(kDim, kStripDim);
inline constexpr int kValueStrips = ceil_div(kValueDim, kStripDim);
inline constexpr bool kWholeStrips = kDim % kStripDim == 0;
inline constexpr bool kWholeValueStrips = kValueDim % kStripDim == 0;
inline constexpr int kRowStrip = kRows * kStripBytes;  // one strip of a warpgroup's rows
inline constexpr int kKeyStrip = kKeys * kStripBytes;
// A page of few tokens would need one copy per strip, since the strips of a tile are far apart.
// With kSideBySide, the strips of each group of 8 tokens are adjacent: the swizzle repeats after 8
// rows, and an MMA takes groups of 8 rows at any distance. Heads must then begin at multiples of
// 128 bytes.
inline constexpr bool kSideBySide = kSource == Source::Pages && kWholeStrips && kWholeValueStrips &&
                                    (kStrips > 1 || kValueStrips > 1);
inline constexpr int kGroup = 8;  // tokens
inline constexpr int kGroupBytes = kGroup * kStripBytes;
// Distances of groups of 8 keys, and of strips.
inline constexpr int kKeyGroupStep = kSideBySide ? kStrips * kGroupBytes : kGroupBytes;
inline constexpr int kStripStep = kSideBySide ? kGroupBytes : kKeyStrip;
inline constexpr int kValueGroupStep = kSideBySide ? kValueStrips * kGroupBytes : kGroupBytes;
inline constexpr int kQueryBytes = kStrips * kRowStrip;  // per warpgroup
inline constexpr int kOutputStripDim = kStripBytes / static_cast<int>(sizeof(OutType));
inline constexpr int kOutputStrips = ceil_div(kValueDim, kOutputStripDim);
inline constexpr int kOutputBytes = kOutputStrips * kRowStrip;
inline constexpr int kKeyBytes = kStrips * kKeyStrip;               // per tile
inline constexpr int kCopiedValueBytes = kValueStrips * kKeyStrip;  // per tile, as copied
// 8-bit wgmma needs keys contiguous along the row: transpose_v.cuh transposes each tile, and the
// copied tiles have their own ring.
inline constexpr int kValueRowBytes = kFp8 && kKeys <= 64 ? 64 : 128;
inline constexpr int kValueBytes = kFp8 ? kValueDim * kValueRowBytes : kCopiedValueBytes;
inline constexpr int kStageBytes = kKeyBytes + kValueBytes + (kFp8 ? kCopiedValueBytes : 0);

// Most sequences of one launch; their tables are in shared memory.
inline constexpr int kMaxBatch = 512;
inline constexpr int kTableBytes = kMaxBatch * 24 + 2048;

// With buffers for the queries of two work tiles, a work tile begins before the previous one has
// ended (consumer.cuh). The output reuses the buffer of its work tile's queries, unless there is
// only one such buffer and room for both, or the output is larger. (With 8-bit queries and head dim
// 256 the output is larger and fits nowhere else: it is written in two passes.)
inline constexpr int kSmemLimit = 227 * 1024 - kTableBytes;
inline constexpr int kLeastRing = 2 * kStageBytes;
inline constexpr int kPasses = kFp8 && kValueDim == 256 ? 2 : 1;
inline constexpr bool kOutputFits = kOutputBytes / kPasses <= kQueryBytes;
inline constexpr int kTwoQueries =
    kConsumers * (2 * kQueryBytes + (kOutputFits ? 0 : kOutputBytes)) + kLeastRing;
inline constexpr int kQueryBuffers = (kOutputFits || kFp8) && kTwoQueries <= kSmemLimit ? 2 : 1;
inline constexpr bool kShareOutput =
    kOutputFits &&
    (kQueryBuffers == 2 || kConsumers * (kQueryBytes + kOutputBytes) + kLeastRing > kSmemLimit);
inline constexpr int kRingRoom =
    kSmemLimit - kConsumers * (kQueryBuffers * kQueryBytes + (kShareOutput ? 0 : kOutputBytes));
inline constexpr int kStagesFit = kRingRoom / kStageBytes;
inline constexpr int kMaxStages = kDebugPrint ? 2 : 8;
inline constexpr int kStages = kStagesFit < kMaxStages ? kStagesFit : kMaxStages;
// Remaining shared memory may hold one more tile: of values, which are held for longer than keys,
// or of keys where a warpgroup begins with the third tile of a work tile
// (docs/notebooks/prefill.md). With 8 bits this helps three warpgroups with promotion, and then for
// both.
inline constexpr int kRoomLeft = kStages < kMaxStages ? kRingRoom - kStages * kStageBytes : 0;
inline constexpr bool kHasSpareTile = (!kFp8 || kPromotesToGmem) && kRoomLeft >= kValueBytes;
inline constexpr bool kSpareIsKeys =
    !kFp8 && kHasSpareTile && kConsumers == 3 && kKeyBytes <= kValueBytes;
inline constexpr bool kSparesBoth = kPromotesToGmem && kRoomLeft >= kValueBytes + kKeyBytes;
inline constexpr int kKeyStages = kStages + (kSpareIsKeys || kSparesBoth ? 1 : 0);
inline constexpr int kValueStages = kStages + (kHasSpareTile && !kSpareIsKeys ? 1 : 0);
static_assert(kStages >= 2, "one stage is loaded while another is multiplied");
static_assert(ceil_div((kConsumers - 1) * kRows, kKeys) <= kKeyStages,
              "keys that a warpgroup leaves out all come before its first product");
static_assert(kShareOutput ? kOutputFits : kPasses == 1, "the output must fit in its place");

// Work tiles whose descriptions are published ahead.
inline constexpr int kWorkTiles = 3;
// Whether one warp finds work tiles and copies queries, and one each copies keys and values. For
// three consumer warpgroups: finding a work tile takes as long as multiplying a tile, and the first
// keys that the first of them uses are those of the third tile (docs/notebooks/prefill.md).
inline constexpr bool kHasFinder = kSource != Source::Slots && !kFp8 && kConsumers == 3;
// That warp also reads the ids of a work tile's first pages, to hide their latency from the copies.
inline constexpr bool kHandsOverBoxes = kHasFinder && kSource == Source::Pages;

}  // namespace ostinato::prefill
