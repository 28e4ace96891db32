// What a warp's instructions do, lane by lane.
#pragma once

#include "common/async_copy.cuh"
#include "common/mbarrier.cuh"

namespace ostinato {

inline float power_of_2(float x) { return exp2f(x); }

inline float hyperbolic_tangent(float x) { return tanhf(x); }

inline void store_matrices(void* row, const uint32_t (&words)[4]) {
  const emulator::Words* const rows = emulator::exchange({shared_address(row)});
  const int lane = emulator::lane();
  for (int m = 0; m < 4; ++m) {
    std::memcpy(emulator::shared + rows[m * 8 + lane / 4][0] + lane % 4 * 4, &words[m], 4);
  }
  __syncwarp();
}

// One of the two values in a word.
template <class T>
float half_of(uint32_t word, int half) {
  const auto bits = static_cast<uint16_t>(word >> (16 * half));
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(value));
  return static_cast<float>(value);
}

template <class T>
void multiply_by_warp(float (&sums)[4], const uint32_t (&rows)[4], const uint32_t (&columns)[2]) {
  const emulator::Words* const all =
      emulator::exchange({rows[0], rows[1], rows[2], rows[3], columns[0], columns[1]});
  const int lane = emulator::lane();
  float a[2][16], b[2][16];  // of this lane's two rows and two columns
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
      const int at = k % 8 / 2;
      a[half][k] = half_of<T>(all[lane / 4 * 4 + at][half + k / 8 * 2], k % 2);
      b[half][k] = half_of<T>(all[(lane % 4 * 2 + half) * 4 + at][4 + k / 8], k % 2);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      sums[i] += a[i / 2][k] * b[i % 2][k];
    }
  }
}

}  // namespace ostinato
