// A consumer warpgroup's view of the ring: it waits for stages, finds operands in them, multiplies
// and releases them.
#pragma once

#include "common/cluster.cuh"
#include "common/mbarrier.cuh"
#include "common/ring.cuh"
#include "tile_scheduler.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

class Stages {
 public:
  __device__ Stages(const Plan& plan, uint8_t* ring, FixedStorage& fixed)
      : plan_(plan),
        ring_(uniform(shared_address(ring))),
        fixed_(fixed),
        warpgroup_(uniform(threadIdx.x / kWarpgroup)) {}

 protected:
  // With block scales every step waits for its MMAs, so that addresses must not take long: what is
  // from one lane is in uniform registers from here on.
  template <class Value>
  static __device__ __forceinline__ Value uniform(Value value) {
    return kBlockScales ? __shfl_sync(0xffffffff, value, 0) : value;
  }

  __device__ __forceinline__ Channels channels_of(int slot) const {
    return operand<Channels>(
        ring_ + slot * plan_.stage_bytes +
        (kTokenRows ? 0 : warpgroup_in_tile(warpgroup_) * kBlocks * kMmaRows * kPackedDepth));
  }
  __device__ __forceinline__ uint32_t tokens_address(int slot) const {
    return ring_ + slot * plan_.stage_bytes + plan_.weight_bytes +
           (kTokenRows ? warpgroup_in_tile(warpgroup_) * kBlocks * kMmaRows * kUnitDepth : 0);
  }
  __device__ __forceinline__ Tokens tokens_of(int slot) const {
    return operand<Tokens>(tokens_address(slot));
  }

  __device__ __forceinline__ void wait_full(const RingPosition& position) {
    wait(&fixed_.full[position.slot], position.parity);
    if (kThrottled) {
      wait(&fixed_.full_tokens[position.slot], position.parity);
    }
  }

  // Issues the MMAs of a unit of a stage, for the columns from `first_column` on.
  __device__ __forceinline__ void multiply_unit(Channels channels, Tokens tokens, int unit,
                                                int first_column, bool accumulate,
                                                Sum (&sums)[kBlocks][kPieceSums]) const {
    tiled::multiply_unit(channels, unit * kUnitBlocks * plan_.block_bytes, plan_.block_bytes,
                         tokens, unit * plan_.token_rows * kUnitDepth, first_column, accumulate,
                         sums);
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

  const Plan& plan_;
  uint32_t ring_;
  FixedStorage& fixed_;
  int warpgroup_;
  bool shared_ = false;  // the CTAs of the cluster share the K of this tile
  // With block scales: whether this thread releases stages, and the first barrier that it arrives
  // at.
  bool releases_ = false;
  uint32_t empty_ = 0;

 private:
  template <class AnyOperand>
  static __device__ __forceinline__ AnyOperand operand(uint32_t address) {
    return kBlockScales ? AnyOperand::uniform(address) : AnyOperand(address);
  }
};

}  // namespace ostinato::tiled
