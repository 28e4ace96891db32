// The mainloop of a consumer warpgroup of the grouped GEMM. It adds along K in the order of the
// tiled GEMM, whichever tile it has, so that a row has the same bits in each.
#pragma once

#include <type_traits>

#include "common/mma_groups.cuh"
#include "common/ring.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "gemm_w8a8/tiled/scaled_mainloop.cuh"
#include "stages.cuh"

namespace ostinato::moe {

using Mainloop = std::conditional_t<kBlockScales, ScaledMainloop<Stages>, Stages>;

class Consumer : Mainloop {
 public:
  __device__ Consumer(const MoeLinearParams& params, const Plan& plan, uint8_t* ring,
                      Storage& storage)
      : Mainloop(plan, ring, storage), params_(params) {}

  __device__ __forceinline__ void run(int tiles) {
    Epilogue epilogue(params_, plan_, storage_, warpgroup_);
    RingPosition position;
    for_each_tile(params_, plan_, tiles, [&](const WorkTile& tile) {
      if (!has_rows(tile)) {
        pass(position);
        return;
      }
      epilogue.fetch(tile);
      Sum sums[kBlocks][kSums];
#if OSTINATO_BLOCK_SCALES
      sum_scaled(tile, plan_.depth_steps, sums, position);
#else
      sum(sums, position, epilogue);
#endif
      epilogue.store(tile, sums);
    });
  }

 private:
  // Whether any row of a tile is this warpgroup's. Of an expert's last tile maybe none is, and then
  // all MMAs are the other one's.
  __device__ __forceinline__ bool has_rows(const WorkTile& tile) const {
    constexpr int kRows = kBlocks * kMmaRows;
    const int some = warpgroup_ * kRows < tile.rows ? 1 : 0;
    return !kTokenRows || kConsumers == 1 || __shfl_sync(0xffffffff, some, 0) != 0;
  }

  // Releases the stages of a tile.
  __device__ __forceinline__ void pass(RingPosition& position) {
    for (int step = 0; step < plan_.depth_steps; ++step) {
      wait_full(position);
      release(position.slot);
      position.advance(plan_.stages);
    }
  }

  // A template, so that only the variant's own mainloop has to suit its pieces.
  template <class Sums>
  __device__ __forceinline__ void sum(Sums& sums, RingPosition& position, Epilogue& epilogue) {
    int previous = 0;
    if constexpr (kQuantizes) {
      // Scales of rows come with every stage of a tile.
      wait_full(position);
      epilogue.take_scales(storage_.x_scales[position.slot][0]);
    }
    pin(sums);
    for (int step = 0; step < plan_.depth_steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait_full(position);
      const Channels channels = channels_of(position.slot);
      const Tokens tokens = tokens_of(position.slot);
      begin_multiplying();
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        multiply_unit(channels, tokens, unit, 0, step > 0 || unit > 0, sums);
      }
      commit_multiplication();
      // The MMAs of this stage run on; those of the previous stage have completed.
      wait_multiplied<1>();
      if (step > 0) {
        release(previous);
      }
      previous = position.slot;
      position.advance(plan_.stages);
    }
    wait_multiplied<0>();
    pin(sums);
    release(previous);
  }

  const MoeLinearParams& params_;
};

}  // namespace ostinato::moe
