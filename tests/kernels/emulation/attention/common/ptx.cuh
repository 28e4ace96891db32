// What a warp's instructions do, lane by lane.
#pragma once

#include "common/mbarrier.cuh"

namespace ostinato {

inline float power_of_2(float x) { return exp2f(x); }

inline float hyperbolic_tangent(float x) { return tanhf(x); }

inline bool elect_lane() {
  __syncwarp();
  return emulator::lane() == 0;
}

inline void copy_vector(uint32_t to, const void* from) {
  std::memcpy(emulator::shared + to, from, 16);
}

inline void arrive_when_copied(uint64_t* barrier) {
  emulator::yield("nothing");
  arrive(barrier);
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
  uint32_t all_rows[emulator::kLanes][4];
  std::memcpy(all_rows, emulator::exchange(rows), sizeof(all_rows));
  const emulator::Words* const all_columns = emulator::exchange({columns[0], columns[1]});
  const int lane = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t a = all_rows[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const uint32_t b = all_columns[column * 4 + k % 8 / 2][k / 8];
      sums[i] += half_of<T>(a, k % 2) * half_of<T>(b, k % 2);
    }
  }
  __syncwarp();
}

}  // namespace ostinato
