// The part of a small-M GEMM that one CTA does, and the thread that copies its weights.
#pragma once

#include "common/bulk_copy.cuh"
#include "common/cache_policy.cuh"
#include "common/debug.cuh"
#include "common/launch.cuh"
#include "common/params.h"
#include "common/ring.cuh"
#include "small_m_config.cuh"

namespace ostinato::small_m {

// The weight tiles of this CTA and how K is cut.
struct Work {
  int first_tile, end_tile;
  int depth_blocks;  // of kPackedDepth; even
  int chunks;        // of kChunkBlocks, the last one may be shorter

  __device__ explicit Work(const W8A8GemmParams& params) {
    const int tiles = ceil_div(params.n, kPackedRows);
    first_tile = share(tiles, blockIdx.x);
    end_tile = share(tiles, blockIdx.x + 1);
    depth_blocks = ceil_div(params.k, kPackedDepthUnit) * 2;
    chunks = ceil_div(depth_blocks, kChunkBlocks);
  }

 private:
  // tiles * cta / CTAs, by 32-bit divisions that do not overflow.
  static __device__ int share(int tiles, int cta) {
    const int ctas = gridDim.x;
    return tiles / ctas * cta + tiles % ctas * cta / ctas;
  }
};

// Issues the copies of the whole run, stage by stage; run by one thread.
class Producer {
 public:
  __device__ Producer(SharedStorage& shared, const W8A8GemmParams& params, const Work& work)
      : shared_(shared),
        weights_(static_cast<const uint8_t*>(params.w)),
        work_(work),
        policy_(evict_first_policy()),
        tile_(work.first_tile) {}

  __device__ bool done() const { return tile_ >= work_.end_tile; }

  // Fills slots that nothing has used yet. What is in flight when x is asked for is served before
  // x: more than this would delay x by more than it hastens the weights.
  __device__ void prefill() {
    for (int i = 0; i < kPrefillStages && !done(); ++i) {
      issue();
    }
  }

  __device__ void run() {
    // Now, since the successor takes the place of the first CTAs that end, and fills its own ring.
    let_successor_start();
    for (int i = kPrefillStages; i < kStages && !done(); ++i) {
      while (!is_complete(&shared_.full[i - kPrefillStages], 0) &&
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
    const uint32_t bytes = min(kChunkBlocks, work_.depth_blocks - first_block) * kPackedBlockBytes;
    uint64_t* full = &shared_.full[position_.slot];
    OSTINATO_DELAY(small_m_stage_issue, true);
    arrive_expecting(full, tiles * bytes);
    for (int i = 0; i < tiles; ++i) {
      const int64_t block = static_cast<int64_t>(tile_ + i) * work_.depth_blocks + first_block;
      bulk_copy(&shared_.ring[position_.slot][i * kChunkTileBytes],
                weights_ + block * kPackedBlockBytes, bytes, full, policy_);
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
  const uint64_t policy_;
  RingPosition position_;
  int tile_;
  int chunk_ = 0;
};

}  // namespace ostinato::small_m
