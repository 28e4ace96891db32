// The shape of one compiled prefill kernel, from its -D macros, and its use of shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention/params.h"
#include "common/debug.cuh"
#include "common/registers.cuh"
#include "common/sizes.cuh"

// -DOSTINATO_HEAD_DIM=n     of queries and keys, a multiple of 16
// -DOSTINATO_VALUE_DIM=n    of values and output, a multiple of 16
// -DOSTINATO_TYPE=__nv_bfloat16|__half
// -DOSTINATO_KEYS=n         keys of a tile, a multiple of 16
// -DOSTINATO_CONSUMERS=2|3  warpgroups that multiply, each 64 rows
// -DOSTINATO_SOURCE=Packed|Pages|Slots   where keys lie: in rows, one sequence after the other; in
//                           pages of a multiple of 16 tokens; in pages of any size (by threads)
namespace ostinato::prefill {

using Type = OSTINATO_TYPE;

enum class Source { Packed, Pages, Slots };
inline constexpr Source kSource = Source::OSTINATO_SOURCE;

inline constexpr int kDim = OSTINATO_HEAD_DIM;
inline constexpr int kValueDim = OSTINATO_VALUE_DIM;
inline constexpr int kKeys = OSTINATO_KEYS;
inline constexpr int kConsumers = OSTINATO_CONSUMERS;
static_assert(kDim % 16 == 0 && kDim <= 256 && kValueDim % 16 == 0 && kValueDim <= 256,
              "an MMA takes 16 of the head dim, and has at most 256 columns");
static_assert(kKeys % 16 == 0 && kKeys >= 16 && kKeys <= 256, "an MMA takes 16 keys of values");
static_assert(kConsumers == 2 || kConsumers == 3, "two or three warpgroups multiply");

// A warpgroup has 64 rows: queries of one head, or of some heads of a group side by side.
inline constexpr int kRows = 64;
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
inline constexpr int kConsumerThreads = kConsumers * kWarpgroup;
inline constexpr int kScores = kKeys / 2;       // of a thread, in two rows
inline constexpr int kOutputs = kValueDim / 2;  // likewise
inline constexpr int kDimSteps = kDim / 16;
inline constexpr int kKeySteps = kKeys / 16;

using Registers = RegisterTable<kConsumers, kDebugPrint>;
static_assert(kScores + kKeys / 4 + kOutputs + 32 <= Registers::kSplit.consumer,
              "scores, weights and outputs must fit in the registers");

// In shared memory a matrix lies as strips of 64 elements of each row, swizzled as the copy engine
// does; the swizzle repeats every 1024 bytes.
inline constexpr int kElement = 2;  // bytes
inline constexpr int kStripBytes = 128;
inline constexpr int kStripDim = kStripBytes / kElement;
inline constexpr int kStrips = ceil_div(kDim, kStripDim);
inline constexpr int kValueStrips = ceil_div(kValueDim, kStripDim);
inline constexpr bool kWholeStrips = kDim % kStripDim == 0;
inline constexpr bool kWholeValueStrips = kValueDim % kStripDim == 0;
inline constexpr int kRowStrip = kRows * kStripBytes;  // a warpgroup's rows, one strip
inline constexpr int kKeyStrip = kKeys * kStripBytes;
inline constexpr int kQueryBytes = kStrips * kRowStrip;  // of a warpgroup
inline constexpr int kOutputBytes = kValueStrips * kRowStrip;
inline constexpr int kKeyBytes = kStrips * kKeyStrip;  // of a tile
inline constexpr int kValueBytes = kValueStrips * kKeyStrip;

// Sequences of one launch; their tables live in shared memory.
inline constexpr int kMaxBatch = 512;
inline constexpr int kTableBytes = kMaxBatch * 24 + 2048;

// With room for the queries of two items an item begins before the one before it has ended
// (prefill_consumer.cuh). The output takes the place of its item's queries, unless these have a
// single place and it need not.
inline constexpr int kSmemLimit = 227 * 1024 - kTableBytes;
inline constexpr int kLeastRing = 2 * (kKeyBytes + kValueBytes);
inline constexpr int kQueryBuffers =
    kOutputBytes <= kQueryBytes && 2 * kConsumers * kQueryBytes + kLeastRing <= kSmemLimit ? 2 : 1;
inline constexpr bool kShareOutput =
    kQueryBuffers == 2 || kConsumers * (kQueryBytes + kOutputBytes) + kLeastRing > kSmemLimit;
inline constexpr int kRingRoom =
    kSmemLimit - kConsumers * (kQueryBuffers * kQueryBytes + (kShareOutput ? 0 : kOutputBytes));
inline constexpr int kStagesFit = kRingRoom / (kKeyBytes + kValueBytes);
inline constexpr int kMaxStages = kDebugPrint ? 2 : 4;
inline constexpr int kStages = kStagesFit < kMaxStages ? kStagesFit : kMaxStages;
static_assert(kStages >= 2, "one stage is loaded while another is multiplied");
static_assert(!kShareOutput || kOutputBytes <= kQueryBytes, "the output must fit in its place");

// Tiles of queries whose description is ready before they are.
inline constexpr int kItems = 3;

}  // namespace ostinato::prefill
