// A consumer warpgroup's view of the ring of the grouped GEMM: it waits for stages, finds operands
// and scales in them, multiplies and releases them.
#pragma once

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
      : StageOperands(plan, ring), storage_(storage), releases_(threadIdx.x % 32 == 0) {}

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
    if (releases_) {
      arrive(&storage_.empty[slot]);
    }
  }

  Storage& storage_;

 private:
  const bool releases_;
};

}  // namespace ostinato::moe
