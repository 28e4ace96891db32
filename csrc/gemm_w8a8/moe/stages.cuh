// A consumer warpgroup's view of the ring of the grouped GEMM: it waits for stages, finds operands
// and scales in them, multiplies and releases them.
#pragma once

#include "common/cluster.cuh"
#include "common/mbarrier.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "config.cuh"
#include "gemm_w8a8/tiled/block_scales.cuh"
#include "gemm_w8a8/tiled/stage_operands.cuh"

namespace ostinato::moe {

// What the channels of a tile are a multiple of.
inline constexpr int kTileStep = kTokenRows && kScaleChannels == 128 ? kEvenChannels : kPackedRows;

class Stages : public StageOperands<Plan> {
 public:
  static constexpr int kAlternatingScales = moe::kAlternatingScales;
  static constexpr bool kEvenTiles = true;  // kTileStep; those of 8 channels begin with the tile

  __device__ Stages(const Plan& plan, uint8_t* ring, Storage& storage)
      : StageOperands(plan, ring),
        storage_(storage),
        releases_(static_cast<int>(threadIdx.x % 32) <= pairs_of(plan)),
        empty_(shared_address(storage.empty)) {
    if (pairs_of(plan) != 0) {
      empty_ = remote_address(empty_, threadIdx.x % 2);
    }
  }

 protected:
  __device__ __forceinline__ void wait_full(const RingPosition& position) {
    wait(&storage_.full[position.slot], position.parity);
    wait(&storage_.full_tokens[position.slot], position.parity);
    if constexpr (!kQuantizes) {
      fence_shared_for_tma();  // written by cp.async, read by wgmma
    }
  }

  // The scales of a tile in those of a unit of a stage.
  __device__ __forceinline__ TileScales scales_of(const WorkTile& tile, int slot, int unit) const {
    return {storage_.x_scales[slot][unit], storage_.w_scales[slot][unit],
            tile.channel % kScaleChannels};
  }

  __device__ __forceinline__ void release(int slot) {
    OSTINATO_DELAY(release, warpgroup_ == 0);
    __syncwarp();
    if (!releases_) {
      return;
    }
    if (pairs_of(plan_) == 0) {
      arrive(&storage_.empty[slot]);
    } else {
      // At both CTAs: what is copied next may be for both.
      arrive_remote(empty_ + slot * static_cast<int>(sizeof(uint64_t)));
    }
  }

  Storage& storage_;

 private:
  const bool releases_;
  uint32_t empty_;  // the first barrier that this thread arrives at
};

}  // namespace ostinato::moe
