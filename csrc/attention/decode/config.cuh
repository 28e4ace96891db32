// The shape of one compiled decode kernel, from its -D macros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/sizes.cuh"
#include "params.h"

// -DOSTINATO_HEAD_DIM=n              a multiple of 16, at most 256
// -DOSTINATO_TYPE=__nv_bfloat16|__half    query and output
// -DOSTINATO_CACHE=Same|E4m3|Int8    keys and values: of the query's type, or 8-bit with scales
// -DOSTINATO_COLUMNS=8|16|32|64      most queries of a sequence times query heads of a KV head
// -DOSTINATO_COPY_PAGES=1|0          1: by the copy engine, pages of a multiple of 16 tokens;
//                                    0: by threads, pages of any size
// -DOSTINATO_FIXED_TILES=0|n         n: cut every sequence after n times 64 tokens, whatever the
//                                    load, so that a result depends on its own sequence alone
// -DOSTINATO_CLUSTER=1|2|4|8         CTAs that work on the same split (cluster_reduce.cuh); 4 or 1
//                                    of fixed splits, with the same bits
namespace ostinato::decode {

using Type = OSTINATO_TYPE;

struct Same {};
struct E4m3 {};
struct Int8 {};
using Cache = OSTINATO_CACHE;
inline constexpr bool kQuantized = !std::is_same_v<Cache, Same>;
using Operand = std::conditional_t<kQuantized, __half, Type>;  // of the MMAs
inline constexpr int kElementBytes = kQuantized ? 1 : 2;       // of the cache

inline constexpr int kDim = OSTINATO_HEAD_DIM;
inline constexpr int kColumns = OSTINATO_COLUMNS;
inline constexpr int kClusterCtas = OSTINATO_CLUSTER;
inline constexpr bool kCopyPages = OSTINATO_COPY_PAGES != 0;
inline constexpr bool kFixedSplits = OSTINATO_FIXED_TILES > 0;
static_assert(kClusterCtas >= 1 && kClusterCtas <= 8, "a cluster has at most 8 CTAs");
static_assert(8 % kClusterCtas == 0, "the CTAs of a cluster divide 8 lines of an MMA");
static_assert(kDim % 16 == 0 && kDim >= 16 && kDim <= 256, "an MMA takes 16 of the head dim");
static_assert(kColumns == 8 || kColumns == 16 || kColumns == 32 || kColumns == 64,
              "an MMA takes 8 columns, and four warps of 16 hold no more than 64");

// A block is what one warp loads at a time, and what one step of the softmax takes: 16 tokens of a
// page, the rows of an MMA. A tile is a block for each warp of the CTA; or of the cluster, and then
// the schedule says CTA of a cluster.
inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kBlockTokens = 16;
inline constexpr int kShareTokens = kWarps * kBlockTokens;
inline constexpr int kTileTokens = kClusterCtas * kShareTokens;
inline constexpr int kSplitTiles =  // if splits are fixed
    kFixedSplits ? OSTINATO_FIXED_TILES / kClusterCtas : 1;
static_assert(!kFixedSplits || kSplitTiles * kClusterCtas == OSTINATO_FIXED_TILES,
              "cuts are at tiles");

// Each warp of a CTA adds up a chain of blocks, every fourth one, and then the chains are added up.
// For the same bits a CTA of a cluster with fixed splits takes one chain, and its warps divide the
// head dim. Both count tiles from where one of the cluster begins.
inline constexpr bool kChainPerCta = kFixedSplits && kClusterCtas > 1;
inline constexpr int kFirstTileTokens = kFixedSplits ? kWarps * kShareTokens : kTileTokens;
static_assert(!kChainPerCta || (kClusterCtas == kWarps && kColumns == 8 && !kQuantized),
              "a CTA for each chain, and each of its warps has all columns");

// A team of warps shares its blocks and divides the columns, or the head dim; a warp alone shares
// nothing. A warp's registers hold the output of 16 columns, or of 8 if rows are long (but four
// warps make a team).
inline constexpr int kWarpColumns = kColumns == 8 || (kDim > 128 && kColumns <= 32) ? 8 : 16;
inline constexpr int kColumnWarps = kColumns / kWarpColumns;
inline constexpr int kTeamWarps = kChainPerCta ? kWarps : kColumnWarps;
inline constexpr int kTeams = kWarps / kTeamWarps;
inline constexpr int kColumnTiles = kWarpColumns / 8;
static_assert(kTeamWarps * kTeams == kWarps, "teams must divide the warps");

// Warps that wait at the same barrier for copies: a team. But each warp of a chain has its own: as
// long as numbers are guessed (decode_sm90.cu) the others may copy other blocks, or none.
inline constexpr int kArrivalWarps = kChainPerCta ? 1 : kTeamWarps;
inline constexpr int kArrivals = kWarps / kArrivalWarps;

// In shared memory a block lies as strips of 128 bytes of each token, swizzled as the copy engine
// does.
inline constexpr int kRowBytes = kDim * kElementBytes;
inline constexpr int kStripBytes = 128;
inline constexpr int kStrips = ceil_div(kRowBytes, kStripBytes);
inline constexpr bool kWholeStrips = kRowBytes % kStripBytes == 0;
inline constexpr int kBlockBytes = kStrips * kStripBytes * kBlockTokens;

// Bytes in flight are what fills the memory system: up to 192 KB on an SM, in two CTAs that hide
// each other's starts and ends, unless the accumulators of a long row need the registers of both.
inline constexpr int kCtasPerSm = kStrips <= 2 ? 2 : 1;
// Where a cluster adds up its shares there is a stage less: the cluster reduction takes its place.
// Nor has a third stage helped where copies are large and each warp has few products to do.
inline constexpr bool kTwoStages =
    !kChainPerCta && (kClusterCtas > 1 || (kColumns == 8 && kCopyPages && kStrips == 2));
inline constexpr int kRingBytes = (kQuantized || kTwoStages ? 160 : 192) * 1024 / kCtasPerSm;
inline constexpr int kStages = kRingBytes / (2 * kWarps * kBlockBytes);
static_assert(kStages >= 2, "one stage is loaded while another is multiplied");

// Whether a sequence's last block is loaded so that it ends with the last token, and nothing behind
// that is read (mask.cuh). Where there are more rows some kernels have no registers for it.
inline constexpr bool kEndsWithLast = kCopyPages && kColumns == 8;

// Whether CTAs may request work tiles (dynamic_scheduler.cuh): at least so many for each of them,
// of so many tiles that each warp has blocks for its rings in each, and none looks further ahead
// than to the work tile after the next. 8-bit caches of long heads have no registers left for it.
inline constexpr bool kMayScheduleDynamically = kClusterCtas == 1 && kTeamWarps == 1 &&
                                                kColumns == 8 && kCopyPages &&
                                                !(kQuantized && kDim > 128);
inline constexpr int kLeastDynamic = 2;
inline constexpr int kLeastDynamicTiles = kStages + 1;

// Whether CTAs may be told which half of the L2 holds a page (l2_partition.cuh), which has 4096
// bytes of each in turn: where the 16 tokens of a block lie in one.
inline constexpr bool kMayPartitionL2 = kMayScheduleDynamically && kBlockTokens * kRowBytes <= 4096;

// Whether warps that have equal shares wait for each other (throttle.cuh). Clusters of two have
// the longest ones.
inline constexpr bool kMayThrottle = kClusterCtas == 2 && kTeamWarps == 1 && kColumns == 8 &&
                                     kCopyPages && !kQuantized && kDim <= 128 && !kFixedSplits;

// Teams add up their outputs: each becomes the owner of some of the 16-wide steps of the head dim.
// Warps that divide it have no others.
inline constexpr int kSteps = kDim / 16;
inline constexpr int kOwners = kChainPerCta ? kWarps : kTeams;
inline constexpr int kOwnedSteps = ceil_div(kSteps, kOwners);
inline constexpr int kHeldSteps = kChainPerCta ? kOwnedSteps : kSteps;  // of a warp's accumulators
static_assert(!kChainPerCta || 4 % kOwnedSteps == 0, "a warp's steps lie in one strip");

// Sequences of one launch; their tables live in shared memory.
inline constexpr int kMaxBatch = 512;
inline constexpr int kFewSequences = 32;  // that a warp reads for itself

// What a warp owns of a pair of columns, the CTAs of a cluster divide once more.
inline constexpr int kWarpPairs = kWarpColumns / 2;
inline constexpr int kPairVectors = kOwnedSteps * 8;  // float4
inline constexpr int kRankVectors = kPairVectors / kClusterCtas;

// A partial result has a region of each warp: for each pair of its columns, what it owns of the
// head dim as the lanes hold it (epilogue.cuh), then for each pair both columns' weights.
inline constexpr int kRegionVectors = kWarpPairs * (kRankVectors + 1);
inline constexpr int kPartialVectors = kClusterCtas * kWarps * kRegionVectors;

// One counter for each warp of each CTA, as many as the kernel with the most CTAs has, those of the
// work tiles that are scheduled dynamically (dynamic_scheduler.cuh), and that of the CTAs' numbers:
// kernels share a workspace, and no counter may lie where another kernel stores results.
inline constexpr int kOfNumbers = 3, kSchedulerCounters = 4;
inline constexpr int kMostCtasPerSm = 2;
static_assert(kCtasPerSm <= kMostCtasPerSm, "counters for each CTA");
inline int64_t warp_counters(int sms) {
  return static_cast<int64_t>(sms) * kWarps * kMostCtasPerSm;
}
inline int64_t counter_bytes(int sms) {
  return ((warp_counters(sms) + kSchedulerCounters) * sizeof(uint32_t) + 255) / 256 * 256;
}

// Then partial results. Two of each CTA: of a work tile that it ends or passes, and of one that it
// begins. Or, with fixed splits, one of each split (fixed_split.cuh) that `work tiles` sequences
// and KV heads of `tokens` tokens can have; none if none can have two.
inline int64_t workspace_bytes(int sms, int ctas, int64_t work_tiles, int64_t tokens) {
  int64_t partials = int64_t{2} * ctas;
  if constexpr (kFixedSplits) {
    constexpr int64_t kSplitTokens = kSplitTiles * kTileTokens;
    partials =
        tokens > kSplitTokens ? work_tiles * ((tokens + kSplitTokens - 1) / kSplitTokens) : 0;
  }
  return counter_bytes(sms) + partials * kPartialVectors * static_cast<int64_t>(sizeof(float4));
}

}  // namespace ostinato::decode
