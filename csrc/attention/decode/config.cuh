// Compile-time configuration of one decode kernel, from its -D macros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/sizes.cuh"
#include "params.h"

// -DOSTINATO_HEAD_DIM=n              a multiple of 16, at most 256
// -DOSTINATO_TYPE=__nv_bfloat16|__half    query and output
// -DOSTINATO_CACHE=Same|E4m3|Int8    keys and values: the query's type, or 8-bit with scales
// -DOSTINATO_COLUMNS=8|16|32|64      most queries of a sequence times query heads of a KV head
// -DOSTINATO_COPY_PAGES=1|0          1: TMA copies, pages of a multiple of 16 tokens;
//                                    0: cp.async copies, pages of any size
// -DOSTINATO_FIXED_TILES=0|n         n: fixed splits of n times 64 tokens, whatever the load, so
//                                    that a result depends on its own sequence alone
// -DOSTINATO_CLUSTER=1|2|4|8         CTAs that share each split (cluster_reduce.cuh); with fixed
//                                    splits 4 or 1, which give the same bits

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

// A block is the unit of one warp's copies and of one softmax step: 16 tokens of a page, the rows
// of an MMA. A tile is one block per warp of the CTA, or of the cluster if there is one; the
// schedulers' "CTA" is then a cluster.
inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kBlockTokens = 16;
inline constexpr int kShareTokens = kWarps * kBlockTokens;
inline constexpr int kTileTokens = kClusterCtas * kShareTokens;
inline constexpr int kSplitTiles =  // for fixed splits
    kFixedSplits ? OSTINATO_FIXED_TILES / kClusterCtas : 1;
static_assert(!kFixedSplits || kSplitTiles * kClusterCtas == OSTINATO_FIXED_TILES,
              "cuts are at tiles");

// Each warp of a CTA accumulates a chain of blocks (every fourth block), and the chains are added
// at the end of a split. To give the same bits, each CTA of a cluster with fixed splits computes
// one whole chain, and its warps divide the head dim. Both layouts count tiles from the same
// multiple of tokens.
inline constexpr bool kChainPerCta = kFixedSplits && kClusterCtas > 1;
inline constexpr int kFirstTileTokens = kFixedSplits ? kWarps * kShareTokens : kTileTokens;
static_assert(!kChainPerCta || (kClusterCtas == kWarps && kColumns == 8),
              "a CTA for each chain, and each of its warps has all columns");

// The warps of a team process the same blocks and divide the columns (or the head dim); a team of
// one warp shares nothing. A warp's registers hold the output of 16 columns, or of 8 if rows are
// long, unless that needs a team of more than four warps.
inline constexpr int kWarpColumns = kColumns == 8 || (kDim > 128 && kColumns <= 32) ? 8 : 16;
inline constexpr int kColumnWarps = kColumns / kWarpColumns;
inline constexpr int kTeamWarps = kChainPerCta ? kWarps : kColumnWarps;
inline constexpr int kTeams = kWarps / kTeamWarps;
inline constexpr int kColumnTiles = kWarpColumns / 8;
static_assert(kTeamWarps * kTeams == kWarps, "teams must divide the warps");

// Warps that wait at the same barrier for copies: a team. With kChainPerCta each warp has its own
// barrier: while lengths and page ids are speculative (decode_sm90.cu), other warps may copy other
// blocks, or none.
inline constexpr int kArrivalWarps = kChainPerCta ? 1 : kTeamWarps;
inline constexpr int kArrivals = kWarps / kArrivalWarps;

// Shared-memory layout of a block: strips of 128 bytes of each token, with TMA's 128-byte swizzle.
inline constexpr int kRowBytes = kDim * kElementBytes;
inline constexpr int kStripBytes = 128;
inline constexpr int kStrips = ceil_div(kRowBytes, kStripBytes);
inline constexpr bool kWholeStrips = kRowBytes % kStripBytes == 0;
inline constexpr int kBlockBytes = kStrips * kStripBytes * kBlockTokens;

// Bytes in flight saturate memory: up to 192 KB per SM, in two CTAs that hide each other's prologue
// and epilogue, unless the accumulators of a long row need the registers of both.
inline constexpr int kCtasPerSm = kStrips <= 2 ? 2 : 1;
// One stage less where the cluster reduction needs the shared memory, and where a third stage has
// not helped: large copies, and few MMAs per warp.
inline constexpr bool kTwoStages =
    !kChainPerCta && (kClusterCtas > 1 || (kColumns == 8 && kCopyPages && kStrips == 2));
inline constexpr int kRingBytes = (kQuantized || kTwoStages ? 160 : 192) * 1024 / kCtasPerSm;
inline constexpr int kStages = kRingBytes / (2 * kWarps * kBlockBytes);
static_assert(kStages >= 2, "one stage is loaded while another is multiplied");

// Whether a sequence's last block is loaded so that it ends at the last token, which reads nothing
// past the end (mask.cuh). With more rows some kernels have no registers for it.
inline constexpr bool kEndsWithLast = kCopyPages && kColumns == 8;

// Whether CTAs may request work tiles from the dynamic scheduler (dynamic_scheduler.cuh). It needs
// at least kLeastDynamic work tiles per CTA, each of at least kLeastDynamicTiles tiles, so that
// every warp has blocks for all stages in each work tile and no loader looks further ahead than the
// work tile after the next. Kernels with 8-bit caches and long heads have no registers for it.
inline constexpr bool kMayScheduleDynamically = kClusterCtas == 1 && kTeamWarps == 1 &&
                                                kColumns == 8 && kCopyPages &&
                                                !(kQuantized && kDim > 128);
inline constexpr int kLeastDynamic = 2;
inline constexpr int kLeastDynamicTiles = kStages + 1;

// Whether CTAs are mapped to the L2 partitions of their pages (l2_partition.cuh). The partitions
// alternate every 4096 bytes, so the 16 tokens of a block must lie in one such span.
inline constexpr bool kMayPartitionL2 = kMayScheduleDynamically && kBlockTokens * kRowBytes <= 4096;

// Whether warps with equal shares may be throttled (throttle.cuh). Clusters of two have the longest
// shares.
inline constexpr bool kMayThrottle = kClusterCtas == 2 && kTeamWarps == 1 && kColumns == 8 &&
                                     kCopyPages && !kQuantized && kDim <= 128 && !kFixedSplits;

// At the end of a split the teams add their outputs: each team owns some of the 16-wide steps of
// the head dim. Warps that divide the head dim (kChainPerCta) hold only the steps that they own.
inline constexpr int kSteps = kDim / 16;
inline constexpr int kOwners = kChainPerCta ? kWarps : kTeams;
inline constexpr int kOwnedSteps = ceil_div(kSteps, kOwners);
inline constexpr int kHeldSteps = kChainPerCta ? kOwnedSteps : kSteps;  // of a warp's accumulators
static_assert(!kChainPerCta || 4 % kOwnedSteps == 0, "a warp's steps lie in one strip");

// Most sequences of one launch; the tables of their lengths are in shared memory.
inline constexpr int kMaxBatch = 512;
inline constexpr int kFewSequences = 32;  // up to this many: each warp reads all lengths itself

// The CTAs of a cluster divide once more what a warp owns of a pair of columns.
inline constexpr int kWarpPairs = kWarpColumns / 2;
inline constexpr int kPairVectors = kOwnedSteps * 8;  // float4
inline constexpr int kRankVectors = kPairVectors / kClusterCtas;

// A partial has one region per warp: for each pair of its columns, the owned elements of the head
// dim in the order of the lanes (epilogue.cuh), then the weights of both columns of each pair.
inline constexpr int kRegionVectors = kWarpPairs * (kRankVectors + 1);
inline constexpr int kPartialVectors = kClusterCtas * kWarps * kRegionVectors;

// Counters precede the partials: one per warp of each CTA (for the most CTAs that any of the
// kernels runs), those of the dynamic scheduler, and that of the CTA numbers. Kernels share a
// workspace, so a counter must not lie where another kernel stores partials.
inline constexpr int kNumberCounter = 3, kSchedulerCounters = 4;
inline constexpr int kMostCtasPerSm = 2;
static_assert(kCtasPerSm <= kMostCtasPerSm, "counters for each CTA");
inline int64_t warp_counters(int sms) {
  return static_cast<int64_t>(sms) * kWarps * kMostCtasPerSm;
}
inline int64_t counter_bytes(int sms) {
  return ((warp_counters(sms) + kSchedulerCounters) * sizeof(uint32_t) + 255) / 256 * 256;
}

// The partials follow the counters. Two per CTA: one of a work tile that it continues, one of a
// work tile that it begins. With fixed splits, one for each split (fixed_split.cuh) that
// `work_tiles` sequences times KV heads of `tokens` tokens can have; none if no work tile can have
// two splits.
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
