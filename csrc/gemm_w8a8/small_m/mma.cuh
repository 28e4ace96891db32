// The MMA of one warp of the small-M GEMM: 16 weight rows x 8 tokens x 64 of K.
//
// The order of K inside a block is arbitrary as long as weights and tokens agree. Lane l uses bytes
// 16 (l % 4) ... + 15 of weight rows l / 4 and l / 4 + 8, and the same bytes of token l / 4: one
// 16-byte load per row, contiguous over the warp for the weights.
#pragma once

#include <cstdint>

namespace ostinato {

struct WeightFragment {
  uint4 low;   // row l / 4
  uint4 high;  // row l / 4 + 8
};

// Accumulators of an MMA with 16 rows and 8 columns: lane l holds row l / 4 (+ 8 in the last two),
// columns 2 (l % 4) and 2 (l % 4) + 1.
using Accumulator = int32_t[4];

__device__ __forceinline__ void mma(Accumulator& d, uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(Accumulator& sum, const WeightFragment& w,
                                         const uint4& x) {
  mma(sum, w.low.x, w.high.x, w.low.y, w.high.y, x.x, x.y);
  mma(sum, w.low.z, w.high.z, w.low.w, w.high.w, x.z, x.w);
}

}  // namespace ostinato
