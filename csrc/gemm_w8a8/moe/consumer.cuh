// The mainloop of a consumer warpgroup of the grouped GEMM. It adds along K in the order of the
// tiled GEMM, whichever tile it has, so that a row has the same bits in each.
#pragma once

#include "common/ring.cuh"
#include "common/tma.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "gemm_w8a8/tiled/block_scales.cuh"
#include "mma.cuh"

namespace ostinato::moe {

class Consumer {
 public:
  __device__ Consumer(const MoeLinearParams& params, const Plan& plan, uint8_t* ring,
                      Storage& storage)
      : params_(params),
        plan_(plan),
        ring_(shared_address(ring)),
        storage_(storage),
        warpgroup_(threadIdx.x / kWarpgroup) {}

  __device__ __forceinline__ void run(int tiles) {
    Epilogue epilogue(params_, plan_, warpgroup_);
    RingPosition position;
    const int count = tiles * plan_.channel_tiles;
    for (int index = blockIdx.x; index < count; index += gridDim.x) {
      const WorkTile tile = work_tile_at(params_, plan_, tiles, index);
      epilogue.fetch(tile);
      Sum sums[kBlocks][kSums];
      if constexpr (kBlockScales) {
        sum_scaling(sums, position);
      } else {
        sum(sums, position);
      }
      epilogue.store(tile, sums);
    }
  }

 private:
  // This warpgroup's channels and tokens in a stage.
  __device__ __forceinline__ Channels channels_of(int slot) const {
    return Channels(ring_ + slot * plan_.stage_bytes +
                    (kTokenRows ? 0 : warpgroup_ * kBlocks * kMmaRows * kPackedDepth));
  }
  __device__ __forceinline__ Tokens tokens_of(int slot) const {
    return Tokens(ring_ + slot * plan_.stage_bytes + plan_.weight_bytes +
                  (kTokenRows ? warpgroup_ * kBlocks * kMmaRows * kUnitDepth : 0));
  }

  __device__ __forceinline__ void wait_full(const RingPosition& position) {
    wait(&storage_.full[position.slot], position.parity);
    wait(&storage_.full_tokens[position.slot], position.parity);
    fence_shared_for_tma();  // written by cp.async, read by wgmma
  }

  __device__ __forceinline__ void release(int slot) {
    OSTINATO_DELAY(release, warpgroup_ == 0);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(&storage_.empty[slot]);
    }
  }

  // A template, so that only the variant's own mainloop has to suit its pieces.
  template <class Sums>
  __device__ __forceinline__ void sum(Sums& sums, RingPosition& position) {
    int previous = 0;
    pin(sums);
    for (int step = 0; step < plan_.depth_steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait_full(position);
      const Channels channels = channels_of(position.slot);
      const Tokens tokens = tokens_of(position.slot);
      begin_multiplying();
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        multiply_unit(channels, unit * kUnitBlocks * plan_.block_bytes, plan_.block_bytes, tokens,
                      unit * kTokens * kUnitDepth, 0, step > 0 || unit > 0, sums);
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

  // Sums of 128 products are scaled, and added in fp32.
  __device__ __forceinline__ void sum_scaling(Sum (&sums)[kBlocks][kSums], RingPosition& position) {
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (Sum& s : block) {
        s = 0;
      }
    }
    for (int step = 0; step < plan_.depth_steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait_full(position);
      const Channels channels = channels_of(position.slot);
      const Tokens tokens = tokens_of(position.slot);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const TileScales scales = {storage_.x_scales[position.slot][unit],
                                   storage_.w_scales[position.slot][unit], 0};
        RowScales row_scales;
        row_scales.load(scales, warpgroup_);
#pragma unroll
        for (int part = 0; part < kColumnParts; ++part) {
          Sum products[kBlocks][kPieceSums];
          pin(products);
          begin_multiplying();
          multiply_unit(channels, unit * kUnitBlocks * plan_.block_bytes, plan_.block_bytes, tokens,
                        unit * kTokens * kUnitDepth, part * kPieceColumns, false, products);
          commit_multiplication();
          ColumnScales<kEvenChannels> column_scales;
          column_scales.load(scales, part * kPieceColumns);
          wait_multiplied<0>();
          pin(products);
          column_scales.add_scaled(products, row_scales, part * kPieceSums, sums);
        }
      }
      release(position.slot);
      position.advance(plan_.stages);
    }
  }

  const MoeLinearParams& params_;
  const Plan& plan_;
  uint32_t ring_;
  Storage& storage_;
  int warpgroup_;
};

}  // namespace ostinato::moe
