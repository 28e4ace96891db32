// The scheduler and producer of the small-M GEMM: a CTA's weight tiles, and the thread that copies
// them.
#pragma once

#include "common/bulk_copy.cuh"
#include "common/debug.cuh"
#include "common/launch.cuh"
#include "common/ring.cuh"
#include "config.cuh"
#include "gemm_w8a8/params.h"

namespace ostinato::small_m {

// Assigns weight tiles, or pairs of them, to CTAs. Prepared on the host: a division in the kernel
// would delay its first copies.
struct TileShares {
  int per_cta, rest;
  uint32_t reciprocal;  // 2^32 / CTAs, rounded up; exact for up to 1600 CTAs

  TileShares(int tiles, int ctas)
      : per_cta(tiles / ctas),
        rest(tiles % ctas),
        reciprocal(static_cast<uint32_t>(((uint64_t(1) << 32) + ctas - 1) / ctas)) {}

  // tiles * cta / CTAs
  __device__ int first_tile(int cta) const {
    return per_cta * cta + static_cast<int>(__umulhi(rest * cta, reciprocal));
  }
};

// The weight tiles of this CTA, and the chunks of K. Tiles are counted in the order of the work:
// where they are paired, tile 2i has the gates whose ups are in tile 2i + 1.
struct Work {
  int first_tile, end_tile;
  int pairs;         // of tiles in all, where they are paired
  int depth_blocks;  // of kPackedDepth; even
  int chunks;        // of kChunkBlocks; the last one may be shorter

  __device__ Work(const W8A8GemmParams& params, const TileShares& shares) {
    first_tile = kTilesOfUnit * shares.first_tile(blockIdx.x);
    end_tile = kTilesOfUnit * shares.first_tile(blockIdx.x + 1);
    pairs = params.n / (2 * kPackedRows);
    depth_blocks = ceil_div(params.k, kPackedDepthUnit) * 2;
    chunks = ceil_div(depth_blocks, kChunkBlocks);
  }

  // Where a tile, number i of its pass, is among the weights.
  __device__ int weight_tile(int tile, int i) const {
    return kPairedTiles ? tile / 2 + i * pairs : tile + i;
  }

  // The channel of a row of the pass that begins with `tile`.
  __device__ int channel(int tile, int row) const {
    if constexpr (kPairedTiles) {
      return weight_tile(tile, row / kPackedRows) * kPackedRows + row % kPackedRows;
    }
    return tile * kPackedRows + row;
  }
};

// Issues all copies of a CTA, stage by stage. Run by one thread.
class Producer {
 public:
  __device__ Producer(SharedStorage& shared, const W8A8GemmParams& params, const Work& work)
      : shared_(shared),
        weights_(static_cast<const uint8_t*>(params.w)),
        work_(work),
        tile_(work.first_tile) {}

  __device__ bool done() const { return tile_ >= work_.end_tile; }

  // Initialises the full barriers and fills unused stages. Copies in flight when x is requested
  // delay x: more than this would delay x by more than it speeds up the weights.
  __device__ void prefill() {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
#pragma unroll
      for (int j = 0; j < kRowTiles * kHalves; ++j) {
        init_barrier(&shared_.full[i][0][0] + j, 1);
      }
      fence_barrier_init();
      if (i < kPrefillStages && !done()) {
        issue();
      }
    }
  }

  __device__ void run() {
    // Only now, since the next kernel's CTAs replace the first that end, and fill their own rings.
    let_successor_start();
    for (int i = kPrefillStages; i < kStages && !done(); ++i) {
      const int last = min(kRowTiles, work_.end_tile - work_.first_tile) - 1;
      while (!is_complete(&shared_.full[i - kPrefillStages][last][kHalves - 1], 0) &&
             !is_complete(&shared_.x_requested, 0)) {
      }
      issue();
    }
    while (!done()) {
      wait(&shared_.empty[position_.slot], position_.parity ^ 1);
      issue();
    }
  }

 private:
  __device__ void issue() {
    const int tiles = min(kRowTiles, work_.end_tile - tile_);
    const int first_block = chunk_ * kChunkBlocks;
    OSTINATO_DELAY(small_m_stage_issue, true);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (i >= tiles) {
        break;  // the last pass: these barriers are not used
      }
      const int64_t tile_block =
          static_cast<int64_t>(work_.weight_tile(tile_, i)) * work_.depth_blocks + first_block;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        uint64_t* full = &shared_.full[position_.slot][i][half];
        const int begin = half * kHalfBlocks;
        const int blocks = min(kHalfBlocks, work_.depth_blocks - first_block - begin);
        const uint32_t bytes = max(blocks, 0) * kPackedBlockBytes;
        arrive_expecting(full, bytes);  // also for zero bytes: the phase must complete
        if (bytes > 0) {
          bulk_copy_once(
              &shared_.ring[position_.slot][i * kChunkTileBytes + begin * kPackedBlockBytes],
              weights_ + (tile_block + begin) * kPackedBlockBytes, bytes, full);
        }
      }
    }
    position_.advance(kStages);
    if (++chunk_ == work_.chunks) {
      chunk_ = 0;
      tile_ += kRowTiles;
    }
  }

  SharedStorage& shared_;
  const uint8_t* weights_;
  const Work work_;
  RingPosition position_;
  int tile_;
  int chunk_ = 0;
};

// Entry point of the copying warp.
__device__ __forceinline__ void produce(SharedStorage& shared, const W8A8GemmParams& params,
                                        const Work& work) {
  // The first copies wait only for the initialisation of their own barriers, and no consumer waits
  // here for the rest: consumers request x meanwhile.
  Producer producer(shared, params, work);
  if (threadIdx.x == kMmaThreads) {
    producer.prefill();
    for (uint64_t& empty : shared.empty) {
      init_barrier(&empty, kMmaWarps);
    }
    init_barrier(&shared.x_requested, kMmaWarps);
    fence_barrier_init();
  }
  __syncwarp();
  arrive_named(kInitialized, kThreads);
  if (threadIdx.x == kMmaThreads) {
    producer.run();
  }
}

}  // namespace ostinato::small_m
