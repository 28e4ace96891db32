// The rows of a unit in registers, for MMAs of one part of a tile's columns after the other.
//
// Shared memory is what tiles with block scales wait for: an MMA reads its columns for each 64
// rows, and would read these rows again for each part of the columns.
#pragma once

#include "config.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

#if OSTINATO_ROWS_IN_REGISTERS

class RowFragments {
  static_assert(kTokenRows && kBlocks == 1, "a warpgroup has 64 tokens as rows");
  static constexpr int kMmas = kUnitDepth / kMmaDepth;
  static constexpr int kVector = 16;  // bytes, the unit of the swizzle

 public:
  // Loads them from the warpgroup's 64 rows of kUnitDepth bytes, swizzled by TMA, at this shared
  // address: a warp has 16 of them.
  __device__ __forceinline__ void load(uint32_t address) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int mma = 0; mma < kMmas; ++mma) {
      const int vector = mma * (kMmaDepth / kVector) + lane / 16;
      auto& words = words_[mma];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(address + row * kUnitDepth + (vector ^ row % kGroupRows) * kVector));
    }
  }

  // Issues sums = rows · columns for the columns from `first_column` on.
  __device__ __forceinline__ void multiply(Channels channels, int block_bytes, int first_column,
                                           Sum (&sums)[kBlocks][kPieceSums]) const {
#pragma unroll
    for (int mma = 0; mma < kMmas; ++mma) {
      const int depth = mma * kMmaDepth;
      const uint32_t in_block = depth / kPackedDepth * block_bytes + depth % kPackedDepth;
      issue(words_[mma], channels.descriptor(in_block + first_column * kPackedDepth), sums[0],
            mma > 0, std::make_integer_sequence<int, kPieceSums>());
    }
  }

  // Keeps the registers until here: MMAs that run read them.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (auto& words : words_) {
#pragma unroll
      for (uint32_t& word : words) {
        asm volatile("" : "+r"(word)::"memory");
      }
    }
  }

 private:
  template <int... kIndex>
  static __device__ __forceinline__ void issue(const uint32_t (&rows)[4], uint64_t columns,
                                               Sum (&sums)[kPieceSums], bool accumulate,
                                               std::integer_sequence<int, kIndex...>) {
    RegisterMma::fma(
        rows[0], rows[1], rows[2], rows[3], columns, sums[kIndex]...,
        accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  uint32_t words_[kMmas][4];
};
using Rows = RowFragments;

#else
struct NoFragments {};
using Rows = NoFragments;
#endif

}  // namespace ostinato::tiled
