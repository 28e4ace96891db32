// What the MMAs of rows in registers do, thread by thread: a thread has whole rows of them.
#pragma once

#include "common/mma_groups.cuh"
#include "config.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

#if OSTINATO_ROWS_IN_REGISTERS

class RowFragments {
 public:
  void load(uint32_t address) {
    const int first_row = threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    for (int half = 0; half < 2; ++half) {
      for (int depth = 0; depth < kUnitDepth; ++depth) {
        const int row = first_row + half * 8;
        rows_[half][depth] = *Tokens(address).at(row * kUnitDepth + depth);
      }
    }
  }

  void multiply(Channels channels, int block_bytes, int first_column,
                Sum (&sums)[kBlocks][kPieceSums]) const {
    pending_mmas().open.push_back([=, this, &sums] {
      for (int i = 0; i < kPieceSums; ++i) {
        const int column = first_column + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        Sum sum = 0;
        for (int depth = 0; depth < kUnitDepth; ++depth) {
          sum += element_product(channels.at(depth / kPackedDepth * block_bytes +
                                             column * kPackedDepth + depth % kPackedDepth),
                                 &rows_[i / 2 % 2][depth]);
        }
        sums[0][i] = sum;
      }
    });
  }

  void pin() {}

 private:
  char rows_[2][kUnitDepth];
};
using Rows = RowFragments;

#else
struct NoFragments {};
using Rows = NoFragments;
#endif

}  // namespace ostinato::tiled
