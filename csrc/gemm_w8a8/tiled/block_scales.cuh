// Block scales of the tiled GEMM, from shared memory to the sums of a thread. Of a block's 64 rows
// a thread has two, 8 apart, and of every 8 columns two adjacent ones.
#pragma once

#include "config.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

// The scales of the rows of a unit.
struct RowScales {
  // `rows` are those of the tile's rows: of tokens or, for each 8, of channels.
  __device__ __forceinline__ void load(const float* rows, int warpgroup) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int row = (warpgroup_in_tile(warpgroup) * kBlocks + block) * kMmaRows + warp * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + half * 8;
        of[block][half] = rows[kTokenRows ? at + lane / 4 : at / kScaleChannels];
      }
    }
  }

  float of[kBlocks][2];
};

// The scales of the columns of a piece.
class ColumnScales {
  static constexpr int kCount = kTokenRows ? kPieceColumns / kScaleChannels : kPieceColumns / 4;

 public:
  // The most that one load can have: as many as pieces are multiples of, aligned if tiles are.
  static constexpr int kWidest = !kTokenRows ? 1 : kCount % 4 == 0 ? 4 : 2;

  // `columns` are those of the tile's columns, of which the piece's begin at `first_column`. Loads
  // have kVector scales: every lane's load takes a turn of shared memory, however few bytes it has.
  template <int kVector>
  __device__ __forceinline__ void load(const float* columns, int first_column) {
    static_assert(kScaleChannels == 8, "the channels of 8 columns share a scale");
    const int lane = threadIdx.x % 32;
    if constexpr (kTokenRows) {
      using Vector = std::conditional_t<kVector == 4, float4, float2>;
      const Vector* const vectors =
          reinterpret_cast<const Vector*>(columns + first_column / kScaleChannels);
#pragma unroll
      for (int i = 0; i < kCount; i += kVector) {
        const Vector vector = vectors[i / kVector];
        of_[i] = vector.x;
        of_[i + 1] = vector.y;
        if constexpr (kVector == 4) {
          of_[i + 2] = vector.z;
          of_[i + 3] = vector.w;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        of_[i] = columns[first_column + i / 2 * 8 + lane % 4 * 2 + i % 2];
      }
    }
  }

  // Adds the products of a piece to the sums from `first` on.
  __device__ __forceinline__ void add_scaled(const Sum (&products)[kBlocks][kPieceSums],
                                             const RowScales& rows, int first,
                                             Sum (&sums)[kBlocks][kSums]) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kPieceSums; ++i) {
        const float column = of_[kTokenRows ? i / 4 : i / 4 * 2 + i % 2];
        const float scale = __fmul_rn(rows.of[block][i / 2 % 2], column);
        sums[block][first + i] = __fmaf_rn(products[block][i], scale, sums[block][first + i]);
      }
    }
  }

 private:
  float of_[kCount];
};

}  // namespace ostinato::tiled
