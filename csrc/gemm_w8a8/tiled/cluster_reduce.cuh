// Two CTAs of a cluster that computed halves of K of one tile add their sums.
#pragma once

#include <cstdint>

#include "common/cluster.cuh"
#include "common/debug.cuh"
#include "config.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

// Adds the partner's accumulators to this CTA's; each CTA keeps half of the columns. The data is
// sent through the receiver's ring, which is idle once both CTAs have finished their MMAs.
__device__ __forceinline__ void cluster_reduce(uint32_t ring, int warpgroup, int rank,
                                               Sum (&sums)[kBlocks][kSums],
                                               Sum (&reduced)[kBlocks][kSums / 2]) {
  constexpr int kHalf = kSums / 2;
  constexpr int kVector = 4;
  const uint32_t mine =
      ring +
      (warpgroup * kBlocks * kHalf * kWarpgroup + threadIdx.x % kWarpgroup * kVector) * sizeof(Sum);
  const bool first = rank == 0;
  const uint32_t theirs = remote_address(mine, first ? 1 : 0);
  sync_cluster();
#pragma unroll
  for (int i = 0; i < kBlocks * kHalf; i += kVector) {
    Sum* const low = &sums[i / kHalf][i % kHalf];
    Sum* const high = low + kHalf;
    uint32_t words[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      // Moves this CTA's half to `low`, so that the other half of the registers becomes free.
      const Sum sent = first ? high[j] : low[j];
      low[j] = first ? low[j] : high[j];
      words[j] = reinterpret_cast<const uint32_t&>(sent);
    }
    store_remote(theirs + i * kWarpgroup * sizeof(Sum), words);
  }
  OSTINATO_DELAY(cluster_reduce, warpgroup == 0);
  sync_cluster();
#pragma unroll
  for (int i = 0; i < kBlocks * kHalf; i += kVector) {
    uint32_t words[kVector];
    load_shared(mine + i * kWarpgroup * sizeof(Sum), words);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      reduced[i / kHalf][i % kHalf + j] =
          sums[i / kHalf][i % kHalf + j] + reinterpret_cast<const Sum&>(words[j]);
    }
  }
}

}  // namespace ostinato::tiled
