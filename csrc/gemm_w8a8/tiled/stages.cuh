// A consumer warpgroup's view of the ring: it waits for stages, finds operands and scales in them,
// multiplies and releases them.
#pragma once

#include "block_scales.cuh"
#include "common/cluster.cuh"
#include "common/mbarrier.cuh"
#include "common/ring.cuh"
#include "stage_operands.cuh"
#include "tile_scheduler.cuh"

namespace ostinato::tiled {

class Stages : public StageOperands<Plan> {
 public:
  static constexpr int kAlternatingScales = 1;
  // Whether all tiles begin at multiples of kEvenChannels.
  static constexpr bool kEvenTiles = kEvenChannels == kPackedRows;

  __device__ Stages(const Plan& plan, uint8_t* ring, FixedStorage& fixed)
      : StageOperands(plan, ring), fixed_(fixed) {}

 protected:
  __device__ __forceinline__ void wait_full(const RingPosition& position) {
    wait(&fixed_.full[position.slot], position.parity);
    if (kThrottled) {
      wait(&fixed_.full_tokens[position.slot], position.parity);
    }
  }

  // Whether the CTAs of the cluster share the K of the tile that follows.
  __device__ __forceinline__ void begin_tile(bool shared) {
    shared_ = shared;
    if (kBlockScales) {
      const int lane = threadIdx.x % 32;
      const uint32_t rank = plan_.cluster > 1 && shared ? cluster_rank() : lane;
      releases_ = lane < plan_.cluster;
      empty_ = remote_address(shared_address(fixed_.empty), rank);
    }
  }

  // Releases a stage to the producers that write to it: those of the whole cluster or, while the
  // CTAs share K, the CTA's own. The barrier counts equally many arrivals either way.
  __device__ __forceinline__ void release(int slot) {
    OSTINATO_DELAY(release, warpgroup_ == 0);
    if constexpr (kBlockScales) {
      // MMAs are of the whole warpgroup, but every warp reads block scales by itself.
      __syncwarp();
      if (releases_) {
        arrive_remote(empty_ + slot * sizeof(uint64_t));
      }
      return;
    }
    const int thread = threadIdx.x % kWarpgroup;
    if (thread >= plan_.cluster) {
      return;
    }
    if (plan_.cluster == 1 || shared_) {
      arrive(&fixed_.empty[slot]);
    } else {
      arrive_at(&fixed_.empty[slot], thread);
    }
  }

  // The scales of a tile in those of a unit of a stage. A template, so that only variants with
  // scales need their memory.
  template <class AnyTile, class Storage = FixedStorage>
  __device__ __forceinline__ TileScales scales_of(const AnyTile& work_tile, int slot,
                                                  int unit) const {
    const Storage& fixed = fixed_;
    const int place_x = place_in_scale_box(work_tile.token);
    const int place_w = place_in_scale_box(work_tile.channel / kScaleChannels);
    return {fixed.x_scales[slot].of[unit] + place_x, fixed.w_scales[slot].of[unit] + place_w,
            work_tile.channel % kScaleChannels};
  }

  FixedStorage& fixed_;
  bool shared_ = false;  // the CTAs of the cluster share the K of this tile
  // With block scales: whether this thread releases stages, and the first barrier that it arrives
  // at.
  bool releases_ = false;
  uint32_t empty_ = 0;
};

}  // namespace ostinato::tiled
