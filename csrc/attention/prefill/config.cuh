// The shape of one compiled prefill kernel, from its -D macros, and its use of shared memory.
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
// -DOSTINATO_BYTES=0|1       whether elements have 8 bits
// -DOSTINATO_KEYS=n         keys of a tile, a multiple of what an MMA takes: 16, of 8 bits 32
// -DOSTINATO_CONSUMERS=2|3  warpgroups that multiply, each 64 rows
// -DOSTINATO_SOURCE=Packed|Pages|Slots   where keys lie: in rows, one sequence after the other; in
//                           pages of a multiple of 16 tokens; in pages of any size (by threads)
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
inline constexpr int kMmaDepth = 32 / kElement;  // elements that one MMA sums
static_assert(kDim % kMmaDepth == 0 && kDim <= 256 && kValueDim % 16 == 0 && kValueDim <= 256,
              "an MMA takes some of the head dim, and has at most 256 columns");
static_assert(kKeys % kMmaDepth == 0 && kKeys >= 16 && kKeys <= (kFp8 ? 128 : 256),
              "an MMA takes some keys of values; 8-bit values lie in rows of up to 128 keys");
static_assert(!kFp8 || (kSource == Source::Packed &&
                        (kValueDim == 64 || kValueDim == 128 || kValueDim == 256)),
              "8-bit values are packed, of 64, 128 or 256 columns");
static_assert(kConsumers == 2 || kConsumers == 3, "two or three warpgroups multiply");

// A warpgroup has 64 rows: queries of one head, or of some heads of a group side by side.
inline constexpr int kRows = 64;
inline constexpr int kWarpgroup = 128;  // threads
// Where an work tile has more queries than a tile keys, its last tiles may be behind all that a
// warpgroup sees: it leaves them out.
inline constexpr bool kLeavesOut = kConsumers * kRows > kKeys;
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
inline constexpr int kConsumerThreads = kConsumers * kWarpgroup;
inline constexpr int kScores = kKeys / 2;       // of a thread, in two rows
inline constexpr int kOutputs = kValueDim / 2;  // likewise
inline constexpr int kDimSteps = kDim / kMmaDepth;
inline constexpr int kKeySteps = kKeys / kMmaDepth;
// The products of a tile's 8-bit weights and values are added to the output in fp32, if registers
// have room for both (consumer_fp8.cuh). Otherwise the output takes them at once; of 8 bits
// for kSumTiles tiles, before it is put aside (promote_gmem.cuh). OSTINATO_PROMOTES_TO_GMEM is for
// asm that names its registers.
#define OSTINATO_PROMOTES_TO_GMEM \
  (OSTINATO_BYTES != 0 &&         \
   (OSTINATO_VALUE_DIM == 256 || (OSTINATO_VALUE_DIM == 128 && OSTINATO_CONSUMERS == 3)))
inline constexpr bool kPromotesToGmem = OSTINATO_PROMOTES_TO_GMEM;
// Tiles whose products the tensor cores sum, and slices of the outputs, of which one is put aside
// with each: of fewer they cut off less, and are slower (docs/prefill.md).
inline constexpr int kSumTiles = 16;
// The workspace: a counter, and what each CTA puts aside.
inline constexpr int kCounterBytes = kPromotesToGmem ? 256 : 8;
inline constexpr int kPromotionBytes = kPromotesToGmem ? kOutputs * 4 * kConsumerThreads : 0;

// Of three warpgroups, those that multiply head dims up to 64 can spare some for warps that copy
// pages.
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

// In shared memory a matrix lies as strips of 128 bytes of each row, swizzled as the copy engine
// does; the swizzle repeats every 1024 bytes.
inline constexpr int kStripBytes = 128;
inline constexpr int kStripDim = kStripBytes / kElement;
inline constexpr int kStrips = ceil_div(kDim, kStripDim);
inline constexpr int kValueStrips = ceil_div(kValueDim, kStripDim);
inline constexpr bool kWholeStrips = kDim % kStripDim == 0;
inline constexpr bool kWholeValueStrips = kValueDim % kStripDim == 0;
inline constexpr int kRowStrip = kRows * kStripBytes;  // a warpgroup's rows, one strip
inline constexpr int kKeyStrip = kKeys * kStripBytes;
// A page of few tokens is a copy for each strip, since strips are a tile apart, unless those of 8
// tokens lie side by side: the swizzle repeats after 8, and an MMA takes groups of 8 at any
// distance. Heads then have to begin at multiples of 128 bytes.
inline constexpr bool kSideBySide = kSource == Source::Pages && kWholeStrips && kWholeValueStrips &&
                                    (kStrips > 1 || kValueStrips > 1);
inline constexpr int kGroup = 8;  // tokens
inline constexpr int kGroupBytes = kGroup * kStripBytes;
// How far groups of 8 keys are from each other, and strips.
inline constexpr int kKeyGroupStep = kSideBySide ? kStrips * kGroupBytes : kGroupBytes;
inline constexpr int kStripStep = kSideBySide ? kGroupBytes : kKeyStrip;
inline constexpr int kValueGroupStep = kSideBySide ? kValueStrips * kGroupBytes : kGroupBytes;
inline constexpr int kQueryBytes = kStrips * kRowStrip;  // of a warpgroup
inline constexpr int kOutputStripDim = kStripBytes / static_cast<int>(sizeof(OutType));
inline constexpr int kOutputStrips = ceil_div(kValueDim, kOutputStripDim);
inline constexpr int kOutputBytes = kOutputStrips * kRowStrip;
inline constexpr int kKeyBytes = kStrips * kKeyStrip;               // of a tile
inline constexpr int kCopiedValueBytes = kValueStrips * kKeyStrip;  // likewise, as they are copied
// An MMA takes 8-bit values only with keys along the row: transpose_v.cuh turns the tile, and
// what is copied has a ring of its own.
inline constexpr int kValueRowBytes = kFp8 && kKeys <= 64 ? 64 : 128;
inline constexpr int kValueBytes = kFp8 ? kValueDim * kValueRowBytes : kCopiedValueBytes;
inline constexpr int kStageBytes = kKeyBytes + kValueBytes + (kFp8 ? kCopiedValueBytes : 0);

// Sequences of one launch; their tables live in shared memory.
inline constexpr int kMaxBatch = 512;
inline constexpr int kTableBytes = kMaxBatch * 24 + 2048;

// With room for the queries of two work tiles an work tile begins before the one before it has
// ended (consumer.cuh). The output takes the place of its work tile's queries, unless these have a
// single place and it need not, or it is larger. (An output of 8-bit queries is: of head dim 256,
// where nothing else has room for it, it takes their place in two passes.)
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
// What is left may have room for one more tile: of values, which are held for longer than keys, or
// of keys where a warpgroup begins with the third of an work tile (docs/prefill.md). With 8 bits
// that gains something where three warpgroups take them at times of their own, and then for both.
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

// Tiles of queries whose description is ready before they are.
inline constexpr int kWorkTiles = 3;
// Whether a warp of its own finds work tiles and copies queries, and one each keys and values: for
// three warpgroups. To find an work tile takes as long as to multiply a tile, and the keys that the
// first of them begins with are the third of an work tile (docs/prefill.md).
inline constexpr bool kHasFinder = kSource != Source::Slots && !kFp8 && kConsumers == 3;
// It also reads the ids of an work tile's first pages, which those that copy would wait for.
inline constexpr bool kHandsOverBoxes = kHasFinder && kSource == Source::Pages;

}  // namespace ostinato::prefill
