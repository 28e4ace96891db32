// What an MMA of 16 rows, 8 columns and 32 of K does: lanes hand each other their fragments.
#pragma once

#include <cstdint>

#include "emulator.h"

namespace ostinato {

struct WeightFragment {
  uint4 low, high;
};
using Accumulator = int32_t[4];

inline int32_t products_of_bytes(uint32_t a, uint32_t b) {
  int32_t sum = 0;
  for (int i = 0; i < 32; i += 8) {
    sum += static_cast<int8_t>(a >> i & 0xff) * static_cast<int8_t>(b >> i & 0xff);
  }
  return sum;
}

inline void mma(Accumulator& d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                uint32_t b1) {
  const emulator::Words* const of = emulator::exchange({a0, a1, a2, a3, b0, b1});
  const int lane = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
    for (int quarter = 0; quarter < 4; ++quarter) {
      const auto& a = of[4 * row + quarter];
      const auto& b = of[4 * column + quarter];
      d[i] += products_of_bytes(a[half], b[4]) + products_of_bytes(a[2 + half], b[5]);
    }
  }
}

inline void multiply(Accumulator& sum, const WeightFragment& w, const uint4& x) {
  mma(sum, w.low.x, w.high.x, w.low.y, w.high.y, x.x, x.y);
  mma(sum, w.low.z, w.high.z, w.low.w, w.high.w, x.z, x.w);
}

}  // namespace ostinato
