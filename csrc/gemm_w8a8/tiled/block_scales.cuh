// Block scales of the tiled GEMM, from shared memory to the sums of a thread.
#pragma once

#include "config.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

// The scales by which a thread multiplies the products of a piece. Of a block's 64 rows it has two,
// 8 apart, and of every 8 columns two adjacent ones.
class PieceScales {
  static constexpr int kColumnScales = kTokenRows ? kPieceColumns / 8 : kPieceColumns / 4;

 public:
  // `rows` are the scales of the tile's rows: of tokens or, for each 8, of channels. `columns` are
  // those of its columns, of which the piece's begin at `first_column`.
  __device__ __forceinline__ PieceScales(const float* rows, const float* columns, int first_column,
                                         int warpgroup) {
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
    static_assert(kScaleChannels == 8, "the channels of 8 columns share a scale");
#pragma unroll
    for (int i = 0; i < kColumnScales; ++i) {
      columns_[i] = columns[kTokenRows ? first_column / kScaleChannels + i
                                       : first_column + i / 2 * 8 + lane % 4 * 2 + i % 2];
    }
  }

  // Adds the products of a piece to the sums from `first` on.
  __device__ __forceinline__ void add_scaled(const Sum (&products)[kBlocks][kPieceSums], int first,
                                             Sum (&sums)[kBlocks][kSums]) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kPieceSums; ++i) {
        const float column = columns_[kTokenRows ? i / 4 : i / 4 * 2 + i % 2];
        const float scale = __fmul_rn(rows_[block][i / 2 % 2], column);
        sums[block][first + i] = __fmaf_rn(products[block][i], scale, sums[block][first + i]);
      }
    }
  }

 private:
  float rows_[kBlocks][2], columns_[kColumnScales];
};

}  // namespace ostinato::tiled
