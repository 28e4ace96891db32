// Block scales of the tiled GEMM, from shared memory to the sums of a thread. Of a block's 64 rows
// a thread has two, 8 apart, and of every 8 columns two adjacent ones.
#pragma once

#include "config.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

// Of a tile: its scales in those of a unit, and where its first channel is in its block.
struct TileScales {
  const float* x;
  const float* w;
  int in_block;
};

// The scales of the rows of a unit. Of a block of channels there are kAlternating, and each 8
// channels have the next of them.
template <int kAlternating>
struct RowScales {
  // Those of the tile's rows: of tokens or, for each kScaleChannels, of channels.
  __device__ __forceinline__ void load(const TileScales& tile, int warpgroup) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int row = (warpgroup_in_tile(warpgroup) * kBlocks + block) * kMmaRows + warp * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + half * 8;
        const int in_block = (tile.in_block + at) / kScaleChannels * kAlternating;
        of[block][half] =
            kTokenRows ? tile.x[at + lane / 4] : tile.w[in_block + half % kAlternating];
      }
    }
  }

  float of[kBlocks][2];
};

// What the first channels of most tiles are multiples of: so many channels of a piece, from its
// first one on, have scales that one load can have, or the same one.
constexpr int greatest_common_divisor(int a, int b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}
inline constexpr int kEvenChannels =
    !kTokenRows ? kPackedRows
                : greatest_common_divisor(kPieceColumns, kScaleChannels == 8 ? 32 : kScaleChannels);

// The scales of the columns of a piece. Tiles begin at multiples of kEven channels. kAlternating is
// that of the rows.
template <int kEven, int kAlternating>
class ColumnScales {
  static_assert(kScaleChannels != 8 || kAlternating == 1, "all 8 channels of a block have a scale");
  // Columns that share a scale: of tokens none do, but a thread has two of every 8.
  static constexpr int kShared = !kTokenRows ? 4 : kScaleChannels == 8 ? 8 : kEven;
  static constexpr int kCount = kPieceColumns / kShared;
  // Scales of one load: every lane's load takes a turn of shared memory, however few bytes it has.
  static constexpr int kVector = kEven / kScaleChannels;

 public:
  // The piece's columns begin at `first_column` of the tile's.
  __device__ __forceinline__ void load(const TileScales& tile, int first_column) {
    const int lane = threadIdx.x % 32;
    if constexpr (!kTokenRows) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        of_[i][0] = tile.x[first_column + i / 2 * 8 + lane % 4 * 2 + i % 2];
      }
    } else if constexpr (kScaleChannels == 8) {
      static_assert(kVector == 2 || kVector == 4);
      using Vector = std::conditional_t<kVector == 4, float4, float2>;
      const Vector* const vectors =
          reinterpret_cast<const Vector*>(tile.w + first_column / kScaleChannels);
#pragma unroll
      for (int i = 0; i < kCount; i += kVector) {
        const Vector vector = vectors[i / kVector];
        of_[i][0] = vector.x;
        of_[i + 1][0] = vector.y;
        if constexpr (kVector == 4) {
          of_[i + 2][0] = vector.z;
          of_[i + 3][0] = vector.w;
        }
      }
    } else {
      const int in_block = kEven == kScaleChannels ? 0 : tile.in_block;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int block = (in_block + first_column + i * kShared) / kScaleChannels;
#pragma unroll
        for (int next = 0; next < kAlternating; ++next) {
          of_[i][next] = tile.w[block * kAlternating + next];
        }
      }
    }
  }

  // Adds the products of a piece to the sums from `first` on.
  __device__ __forceinline__ void add_scaled(const Sum (&products)[kBlocks][kPieceSums],
                                             const RowScales<kAlternating>& rows, int first,
                                             Sum (&sums)[kBlocks][kSums]) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kPieceSums; ++i) {
        const float column =
            kTokenRows ? of_[i / 4 * 8 / kShared][i / 4 % kAlternating] : of_[i / 4 * 2 + i % 2][0];
        const float scale = __fmul_rn(rows.of[block][i / 2 % 2], column);
        sums[block][first + i] = __fmaf_rn(products[block][i], scale, sums[block][first + i]);
      }
    }
  }

 private:
  float of_[kCount][kTokenRows ? kAlternating : 1];
};

}  // namespace ostinato::tiled
