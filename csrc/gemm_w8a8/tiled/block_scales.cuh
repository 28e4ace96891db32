// Block scales of the tiled GEMM, from shared memory to the sums of a thread.
#pragma once

#include "config.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

// The scales of one unit of K by which a thread multiplies its products. Of a block's 64 rows it
// has two, 8 apart, and of every 8 columns two adjacent ones.
class UnitScales {
  static constexpr int kColumnScales = kTokenRows ? kTileColumns / 8 : kTileColumns / 4;

 public:
  // Whether those of all columns fit in the registers beside all sums.
  static constexpr bool kFit =
      kBlocks * kSums * kSumSets + kUnits * (kBlocks * 2 + kColumnScales) <= 192;

  // `rows` are the scales of the tile's rows: of tokens or, for each 8, of channels.
  __device__ __forceinline__ void load_rows(const float* rows, int warpgroup) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int row = (warpgroup_in_tile(warpgroup) * kBlocks + block) * kMmaRows + warp * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + half * 8;
        rows_[block][half] = rows[kTokenRows ? at + lane / 4 : at / kScaleChannels];
      }
    }
  }

  __device__ __forceinline__ void load_columns(const float* columns) {
    static_assert(kScaleChannels == 8, "the channels of 8 columns share a scale");
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kColumnScales; ++i) {
      columns_[i] = columns[kTokenRows ? i : i / 2 * 8 + lane % 4 * 2 + i % 2];
    }
  }

  __device__ __forceinline__ void add_scaled(const Sum (&products)[kBlocks][kSums],
                                             Sum (&sums)[kBlocks][kSums]) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const float column = columns_[kTokenRows ? i / 4 : i / 4 * 2 + i % 2];
        const float scale = __fmul_rn(rows_[block][i / 2 % 2], column);
        sums[block][i] = __fmaf_rn(products[block][i], scale, sums[block][i]);
      }
    }
  }

 private:
  float rows_[kBlocks][2], columns_[kColumnScales];
};

}  // namespace ostinato::tiled
